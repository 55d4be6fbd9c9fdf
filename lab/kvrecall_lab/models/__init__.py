"""Small models of every shape (the product's and more), and
folders that differ from another in one thing.

``experts`` and ``hybrid`` draw the weights of the families that the product has not; ``variants``
changes a folder.
"""

from functools import partial

from kvrecall.bench import model
from kvrecall.bench.model import WEIGHTS, Family, Tensors
from kvrecall_lab.models import experts, hybrid
from kvrecall_lab.models.variants import (
    ADAPTER,
    LONG_ROPE_FROM,
    write_blip2,
    write_changed,
    write_code,
    write_indexed,
    write_kv_scales,
    write_links,
    write_llama4,
    write_lora,
    write_over,
    write_phi3,
    write_picture,
)

__all__ = [
    "ADAPTER",
    "FAMILIES",
    "LONG_ROPE_FROM",
    "WEIGHTS",
    "Tensors",
    "write_blip2",
    "write_changed",
    "write_code",
    "write_indexed",
    "write_kv_scales",
    "write_links",
    "write_llama4",
    "write_lora",
    "write_model",
    "write_over",
    "write_phi3",
    "write_picture",
]

FAMILIES = {
    **model.FAMILIES,
    **experts.FAMILIES,
    **{
        name: Family(class_name, hybrid.SETTINGS[name], hybrid.weights)
        for name, class_name in {
            "gemma3_text": "Gemma3ForCausalLM",
            "gpt_oss": "GptOssForCausalLM",
            "llama4_text": "Llama4ForCausalLM",
            "qwen3_next": "Qwen3NextForCausalLM",
            "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        }.items()
    },
}
"""By ``model_type``. ``window`` is what a layer with a sliding window or a chunk attends to: two of
three layers of gemma3_text, every other of gpt_oss, three of four of llama4_text. Three of four
layers of qwen3_next and granitemoehybrid keep recurrent state."""

write_model = partial(model.write_model, families=FAMILIES)
