"""An agent with NIXL's Python API: programs for NIXL run on Forebay with another import.

What differs is in docs/python.md.
"""

from ._api import DEFAULT_COMM_PORT as DEFAULT_COMM_PORT
from ._api import nixl_agent as nixl_agent
from ._api import nixl_agent_config as nixl_agent_config
from ._api import nixl_backend_handle as nixl_backend_handle
from ._api import nixl_prepped_dlist_handle as nixl_prepped_dlist_handle
from ._api import nixl_thread_sync_t as nixl_thread_sync_t
from ._api import nixl_xfer_handle as nixl_xfer_handle
