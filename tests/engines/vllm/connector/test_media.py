"""Prompts with images: vLLM's own requests and block hashes, the scheduler side, and a real pool.

A prompt has the same placeholder tokens whatever its image shows. Two images must never share KV,
and one image must find its own, in the block where it begins, in those that it fills, and in all
that follow.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from engines.vllm.connector.test_scheduler import BLOCK, Bench
from kvrecall.pool import Pool

PLACEHOLDER = 7
WHOLE = 6 * BLOCK


@pytest.fixture
def bench(pool: Pool) -> Bench:
    return Bench(pool)


def image(identifier: str, offset: int, length: int, modality: str = "image") -> Any:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=None, modality=modality, identifier=identifier, mm_position=place, mm_hash=identifier
    )


def prompt_of(*images: Any) -> list[int]:
    """Six blocks and a token, with placeholders where the images are."""
    tokens = list(range(100, 100 + WHOLE + 1))
    for each in images:
        place = each.mm_position
        tokens[place.offset : place.offset + place.length] = [PLACEHOLDER] * place.length
    return tokens


def asked(bench: Bench, name: str, prompt: list[int], *images: Any) -> Request:
    params = SamplingParams(max_tokens=100)
    params.update_from_generation_config({}, eos_token_id=1)
    request = Request(
        name, prompt, params, None, mm_features=list(images), block_hasher=bench.hasher
    )
    bench.side.admit(request)
    return request


def save(bench: Bench, name: str, prompt: list[int], *images: Any) -> None:
    bench.report(bench.step(asked(bench, name, prompt, *images), len(prompt)))


def recalled(bench: Bench, name: str, prompt: list[int], *images: Any) -> int:
    return bench.matched(asked(bench, name, prompt, *images)) or 0


CAT, DOG = "0f" * 32, "1e" * 32


@pytest.mark.parametrize("offset", [0, 5, BLOCK, 2 * BLOCK + 9])
@pytest.mark.parametrize("length", [1, 4, 2 * BLOCK])
@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_another_image_shares_only_what_is_before_it(
    bench: Bench, offset: int, length: int, modality: str
) -> None:
    cat, dog = (image(each, offset, length, modality) for each in (CAT, DOG))
    prompt = prompt_of(cat)
    assert prompt == prompt_of(dog)
    save(bench, "cat", prompt, cat)
    assert recalled(bench, "the cat again", prompt, cat) == WHOLE
    before = offset // BLOCK * BLOCK
    assert recalled(bench, "a dog", prompt, dog) == before
    save(bench, "dog", prompt, dog)
    assert recalled(bench, "the dog again", prompt, dog) == WHOLE
    assert recalled(bench, "still the cat", prompt, cat) == WHOLE


def test_placeholders_without_an_image_are_text(bench: Bench) -> None:
    cat = image(CAT, BLOCK, 4)
    prompt = prompt_of(cat)
    save(bench, "cat", prompt, cat)
    assert recalled(bench, "text", prompt) == BLOCK


def test_one_image_at_another_place_of_equal_tokens(bench: Bench) -> None:
    """The tokens are placeholders all over, so that only the image's place tells the two apart."""
    here, there = image(CAT, BLOCK + 2, 4), image(CAT, BLOCK + 6, 4)
    prompt = prompt_of(image(CAT, BLOCK, BLOCK))
    save(bench, "here", prompt, here)
    assert recalled(bench, "there", prompt, there) == BLOCK
    assert recalled(bench, "here again", prompt, here) == WHOLE


def test_two_images_change_places(bench: Bench) -> None:
    first, second = (BLOCK, 4), (3 * BLOCK, 4)
    prompt = prompt_of(image(CAT, *first), image(DOG, *second))
    save(bench, "cat, dog", prompt, image(CAT, *first), image(DOG, *second))
    assert recalled(bench, "dog, cat", prompt, image(DOG, *first), image(CAT, *second)) == BLOCK
    again = recalled(bench, "cat, cat", prompt, image(CAT, *first), image(CAT, *second))
    assert again == 3 * BLOCK, "up to the second image"
    again = recalled(bench, "cat, dog again", prompt, image(CAT, *first), image(DOG, *second))
    assert again == WHOLE


def test_a_turn_after_the_image_finds_the_whole_dialogue(bench: Bench) -> None:
    cat, dog = image(CAT, 3, 2 * BLOCK), image(DOG, 3, 2 * BLOCK)
    prompt = prompt_of(cat)
    save(bench, "first turn", prompt, cat)
    longer = [*prompt, *range(500, 500 + 2 * BLOCK)]
    assert recalled(bench, "second turn", longer, cat) == WHOLE
    assert recalled(bench, "second turn of another image", longer, dog) == 0
