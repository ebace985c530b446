"""Component `finish`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/finish:0.1.0", install_kfp_package=False)
def finish(status: dsl.PipelineTaskFinalStatus, summary: dsl.Output[dsl.Markdown], tracking: dict, run_id: str):
    """Write the run's summary and release what it holds, whether it succeeded or failed.

    Args:
        status: How the run ended.
        summary: The state, the error, and the table of the rounds.
        tracking: Section `tracking` of params.yaml.
        run_id: Kubeflow's id of the run.
    """
    from rlpipe.kubeflow.gates import finish as end

    end(status, tracking, run_id, summary)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(finish, package_path=__file__.replace(".py", ".yaml"))
