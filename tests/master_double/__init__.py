"""A test double of the Determined master: a real HTTP server that really runs what is submitted.

The command line tool, the SDK and the Core API of the harness (0.35.0 and 0.38.1 were tried) talk
to it unmodified::

    with MasterDouble(path_map={"/pfss/ws": str(tmp_path)}) as master:
        subprocess.run(["det", "-m", master.url, "experiment", "create", "c.yaml", "."])
        master.wait_until(lambda: master.experiments[1].state == "COMPLETED")
        assert master.experiments[1].trials[0].metrics[-1].values["reward"] > 0

Submitted configurations are checked against the keys that both versions accept; experiments and
trials follow the state rules of the 0.35 master (`rules.py`); a trial's container is an ordinary
process that runs the harness's own prep_container and launch (`container.py`).

What it does not imitate:

* images, pip installs of the harness, network isolation, users and permissions of a container,
  cgroup limits, GPUs. The trial's `python3` must already be able to import `determined`;
* any searcher but `single`, so an experiment has exactly one trial; templates; forked, continued,
  deleted and unmanaged experiments;
* bind mounts whose host and container path differ (the paths must exist as they are, after
  `path_map`); object storage; `exclude_node` log policies (there is one agent: only recorded);
* queueing, slots, priorities and other jobs: a trial starts at once;
* multi-container trials, notebooks, shells, TensorBoards, proxies, the web interface, RBAC;
* searcher operations, early exits, alerts, run metadata, heartbeats; whatever else the tests of
  this package do not ask for is answered with 404;
* the tensorboard directory in the checkpoint storage is left alone by checkpoint removal;
* persistence: the state dies with the server.
"""

from .double import MasterDouble
from .records import TERMINAL_STATES

__all__ = ["TERMINAL_STATES", "MasterDouble"]
