"""``vllm`` with Model Runner V2 on a CPU, whose Triton kernels run in its interpreter."""

from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))

from vllm import triton_utils  # noqa: E402

assert triton_utils.HAS_TRITON
del backends["cpu"]  # PyTorch's compiler would take it for one

from vllm.entrypoints.cli.main import main  # noqa: E402

if __name__ == "__main__":  # workers run all above alone
    main()
