"""A device that records what it is asked to launch, and launches nothing: for what happens before a launch."""

import contextlib

from pagedkv.kernels.launch import LAUNCHERS


class Recorder:
    """Takes launches in the place of a GPU.

    Attributes
    ----------
    launches : list of Launch
        All that it was asked for.
    capturing : bool
        Whether it says that a graph is being captured.
    """

    arch = "sm_90a"
    num_multiprocessors = 132

    def __init__(self):
        self.launches = []
        self.capturing = False

    def is_capturing(self):
        """Return what was set."""
        return self.capturing

    def load(self, variant):
        """Load nothing."""

    def launch(self, launch):
        """Record a launch."""
        self.launches.append(launch)

    @contextlib.contextmanager
    def in_place_of_gpu(self):
        """Make the package launch here what it does with tensors on the CPU."""
        LAUNCHERS["cpu"] = lambda _: self
        try:
            yield self
        finally:
            del LAUNCHERS["cpu"]

    def params(self, kernel):
        """Return the parameters of the one launch of a kernel."""
        (launch,) = (launch for launch in self.launches if launch.variant.kernel == kernel)
        return launch.params[0]
