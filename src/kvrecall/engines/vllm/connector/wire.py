from kvrecall.engines.vllm.wire import *  # noqa: F403 - until the laboratory has moved
