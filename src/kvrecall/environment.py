"""Every environment variable that kvrecall reads, or sets for an engine, each declared once.

Those of retrieval attention (``VLLM_RETRIEVAL_*``) are declared with its settings
(``attention/settings.py``), those for Mooncake's client beside it
(``pool/remote/mooncake/store.py``).
"""

from __future__ import annotations


class Variable(str):
    """A variable's name. ``text``: what it does; ``values``: allowed values; ``unset``: the
    default."""

    text: str
    values: str
    unset: str

    def __new__(cls, name: str, text: str, values: str, unset: str) -> Variable:
        self = super().__new__(cls, name)
        self.text, self.values, self.unset = text, values, unset
        return self


API_KEY = Variable(
    "KVRECALL_API_KEY",
    "API key that `kvrecall router` requires of clients and passes on, without a file of keys",
    "any text",
    "no key is required",
)
VLLM_KEY = Variable(
    "VLLM_API_KEY",
    "vLLM's: API key of a server, which `kvrecall serve` requires on every route but health, and "
    "which `kvrecall why` sends; as `--api-key-file`",
    "any text",
    "no key is required",
)
RETRIEVAL = Variable(
    "KVRECALL_RETRIEVAL",
    "enables retrieval attention in an engine's processes; `kvrecall serve --retrieval` sets it",
    "`1`",
    "off, unless `VLLM_PLUGINS` names `retrieval`",
)
WAITS = Variable(
    "KVRECALL_WAITS",
    "how vLLM's processes wait for each other on a CPU. `sleep`: a microsecond at a time, also in "
    "engines without this connector; `spin`: as vLLM does, in every engine",
    "`sleep`, `spin`",
    "engines with the connector sleep",
)
SEEDS = Variable(
    "KVRECALL_SEEDS",
    "applies the patch `seeds` also in engines without the connector: on a CPU, a request with a "
    "`seed` and a prefill of several steps ends vLLM 0.32; `kvrecall serve` sets it",
    "`1`",
    "engines with the connector only",
)
WITH_PARENT = Variable(
    "KVRECALL_WITH_PARENT",
    "ends an engine core when the server that started it is killed; `kvrecall serve` sets it",
    "`1`",
    "engines with the connector only",
)
TRACES_PROTOCOL = Variable(
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "how spans travel to `--otlp-traces-endpoint`, kvrecall's as vLLM's; OpenTelemetry's other "
    "`OTEL_` variables (names, sampling, queues, headers) apply, too",
    "`grpc`, `http/protobuf`",
    "`grpc`",
)
PLUGINS = Variable(
    "VLLM_PLUGINS",
    "vLLM's list of plug-ins, comma-separated. `retrieval` in it enables retrieval attention; "
    "kvrecall's others must be named too, which `kvrecall serve` does",
    "names",
    "vLLM loads all plug-ins",
)
CPU_KV_SPACE = Variable(
    "VLLM_CPU_KVCACHE_SPACE",
    "size of vLLM's device cache on a CPU, GiB; takes precedence over `kvrecall serve`'s",
    "integer",
    "a quarter of the free memory, at most 4 GiB",
)
CPU_RESERVED = Variable(
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "cores that vLLM leaves to its engine process on a CPU; `kvrecall serve` sets it",
    "integer",
    "one for each worker",
)
NO_COMPILING = Variable(
    "TORCHDYNAMO_DISABLE",
    "disables PyTorch's compiler; `kvrecall serve` sets it on a CPU without `g++`, which compiling "
    "vLLM's sampling functions requires",
    "`1`",
    "PyTorch compiles",
)
HASH_SEED = Variable(
    "PYTHONHASHSEED",
    "root of vLLM's block hashes with the `xxhash` algorithms: must be the same in all engines "
    "that share blocks, and across restarts",
    "integer",
    "random with these algorithms; a warning at the start says so",
)
CACHE_HOME = Variable(
    "XDG_CACHE_HOME",
    "folder in which `kvrecall/fingerprints.json` keeps fingerprints of weights",
    "path",
    "`~/.cache`",
)
HUB_CACHE = Variable(
    "HF_HUB_CACHE",
    "folder of models from the Hugging Face hub, where `kvrecall plan` looks for a hub id",
    "path",
    "`HUGGINGFACE_HUB_CACHE`, else `hub` in `HF_HOME`",
)
OLD_HUB_CACHE = Variable(
    "HUGGINGFACE_HUB_CACHE", "older name of `HF_HUB_CACHE`", "path", "`hub` in `HF_HOME`"
)
HUB_HOME = Variable(
    "HF_HOME",
    "folder of Hugging Face's libraries",
    "path",
    "`huggingface` in `XDG_CACHE_HOME`",
)
TUNED_CONFIGS = Variable(
    "VLLM_TUNED_CONFIG_FOLDER",
    "vLLM's folder of tuned kernels; its contents are part of a block's namespace",
    "path",
    "none",
)
VARIABLES: tuple[Variable, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
