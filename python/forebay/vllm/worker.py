"""vLLM's GPU worker with Forebay's sleep mode.

`--enable-sleep-mode --worker-cls forebay.vllm.worker.Worker` chooses it. It pins memory in the
background after the weights were loaded and the KV cache was laid out: the first sleep need not.
"""

from typing import Any

from vllm.v1.worker import gpu_worker

from forebay.vllm import SLEEP_BACKEND, register, sleep


class Worker(gpu_worker.Worker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Chooses the backend `forebay`, also in versions of vLLM that have no flag for that."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        register()
        vllm_config.model_config.sleep_mode_backend = SLEEP_BACKEND
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._warm()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        if sleep.keeps_kv():
            self._refuse_what_zeroes_kv()
            self._warm()

    def _warm(self) -> None:
        if self.vllm_config.model_config.enable_sleep_mode:
            sleep.warm()

    def _refuse_what_zeroes_kv(self) -> None:
        """vLLM 0.26's V1 model runner zeroes quantised KV after each sleep, even if it was kept."""
        dtype = str(self.cache_config.cache_dtype)
        if hasattr(self.model_runner, "init_fp8_kv_scales") and dtype.startswith(("fp8", "int8", "nvfp4")):
            raise ValueError(
                f"{sleep.KEEP_KV} is 1 and the KV cache's type is {dtype}: this model runner zeroes "
                "quantised KV when it wakes up; allowed are other types, or the other model runner"
            )
