"""Every step as a Kubeflow Pipelines component, in the form of kubeflow/pipelines-components."""
