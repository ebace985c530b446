"""Read by every Python that starts with this folder on its path: installs the fault that the environment names."""

import json
import os

if given := os.environ.get("RLPIPE_TEST_FAULT"):
    from tests.faults.hook import Fault

    Fault(**json.loads(given)).install()
