"""NIXL's module `_bindings`: its names, gathered from where they are defined."""

from ._agent import DEFAULT_COMM_PORT as DEFAULT_COMM_PORT
from ._agent import NIXL_INIT_AGENT as NIXL_INIT_AGENT
from ._agent import nixlAgent as nixlAgent
from ._agent import nixlAgentConfig as nixlAgentConfig
from ._agent import nixlXferTelemetry as nixlXferTelemetry
from ._enums import *  # noqa: F403
from ._errors import *  # noqa: F403
from ._lists import nixlRegDList as nixlRegDList
from ._lists import nixlRemoteDList as nixlRemoteDList
from ._lists import nixlXferDList as nixlXferDList

# No code of ours on a GPU could use memory views.
HAVE_UCX_GPU_DEVICE_API = False
