"""The words of facts, and ordinary sentences that contain none of them. Standard library only.

A key is an adjective and a noun ("amber falcon"), a value a number of three digits. The tokenizer
is trained so that every one of these words, with the space before it, is one token. Filler comes
from a small grammar with a few hundred other words: enough variety that sentences seldom repeat,
and no number of three digits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

ADJECTIVES: tuple[str, ...] = tuple(
    """amber azure brave brisk bronze calm candid cedar clever copper coral cosmic crimson
    crystal curly daring dusky eager ebony elfin emerald fabled fancy fearless feral fiery
    floral fluffy frosty gallant gentle giant gilded glassy golden graceful grumpy hazel
    hidden hollow humble icy indigo ivory jade jolly jovial keen lively lonely lucky lunar
    magic maroon mellow merry mighty misty modest mossy navy nimble noble olive opal orange
    pale pearly placid plucky polar proud purple quaint rapid regal rosy royal ruby rustic
    sacred sandy scarlet secret shiny silent silver sleepy solar speckled spiral stormy
    sturdy sunny swift tawny teal timid tiny topaz velvet violet vivid wicked wild witty
    zesty""".split()
)

NOUNS: tuple[str, ...] = tuple(
    """acorn anchor antler anvil arrow badger bamboo banner barrel basket beacon beaver beetle
    bison blossom bobcat bonnet boulder bracelet bramble bucket buffalo butterfly button cactus
    camel canary candle cannon canoe caravan castle cheetah cherry chimney cobra comet compass
    condor cougar coyote cradle crane cricket crown dagger daisy dolphin donkey dragon drum
    eagle elephant elk ember falcon feather ferret fiddle finch flamingo flute fox gazelle
    gecko giraffe glacier goblet gopher gorilla guitar hammer hamster harbor harp hawk hedgehog
    helmet heron hornet hyena ibis iguana jackal jaguar jasmine jewel kayak kettle kitten
    koala ladder lantern lemur leopard lily lion lizard llama lobster locket lotus lynx magpie
    mammoth mango marble marmot meteor mirror mongoose moose mosquito muffin narwhal nectar
    needle newt nugget octopus orchid osprey ostrich otter owl oyster panda panther parrot
    peacock pebble pelican penguin pepper pheasant pigeon pillow piranha planet plover pony
    poppy porcupine possum puffin puma pumpkin bagel quail rabbit raccoon raven ribbon robin
    rocket saddle salmon scorpion seagull shark shield shrimp shuttle skunk sloth sparrow
    spider squid squirrel stallion starfish stork swan sword tapir teapot thistle tiger tortoise
    toucan trumpet trout tulip tunnel turtle umbrella unicorn viper volcano vulture walnut
    walrus weasel whale willow wizard wolf wombat yak zebra""".split()
)

VALUES: tuple[str, ...] = tuple(str(n) for n in range(100, 1000))


# -- filler ----------------------------------------------------------------------------------


def _listed(table: str) -> tuple[str, ...]:
    return tuple(" ".join(entry.split()) for entry in table.split("|"))


_PEOPLE = _listed(
    """the teacher|the baker|a farmer|my neighbour|the doctor|her brother|his aunt|the
postman|an engineer|the librarian|our guide|the gardener|a student|the captain|the painter|
their cousin|the shopkeeper|a traveller|the mayor|the carpenter|the old man|a young woman|the
children|two friends|the driver|the cook|a visitor|the judge|the writer|the musician"""
)
_PLACES = _listed(
    """the village|the market|the station|the river|the library|the old mill|the school|
the kitchen|the garden|the bridge|the town hall|the beach|the forest|the hotel|the museum|the
workshop|the church|the main road|the valley|the lake|the office|the theatre|the park|the
hospital|the north field|the corner shop|the hill|the square|the bakery|the upper floor"""
)
_THINGS = _listed(
    """a letter|some bread|the newspaper|a coat stand|the accounts|a map|two chairs|
the keys|a wooden box|fresh vegetables|an old photograph|the engine|a bicycle|the timetable|
a pot of tea|the report|a blanket|several books|the wall clock|a bottle of milk|the fence|
a bag of flour|the radio|some tools|a new coat|the broken window|a long rope|the weekly list|
the garden gate|a piece of cloth"""
)
_ACTIONS = _listed(
    """carried|forgot|found|repaired|sold|bought|looked for|described|borrowed|measured|
left|brought|cleaned|showed|painted|noticed|packed|ordered|paid for|moved|asked about|kept|
lost|returned|checked|counted|drew|wrapped|collected|promised"""
)
_TIMES = _listed(
    """in the morning|last week|before lunch|after the rain|every Monday|on Sunday|at
noon|late in the evening|during the winter|in early spring|the day before|some years ago|
that afternoon|once a month|at the end of summer|all night|for an hour|as usual|without
hurry|in the meantime"""
)
_REASONS = _listed(
    """because the weather was changing|although nobody had asked|while the others were
waiting|since the train was late|as the light was fading|when the work was done|because it
had rained for days|though it was not far|until the shops closed|while the soup boiled over|
since there was plenty of time|as everyone expected|before anyone could answer|because the
road was closed|although the price had gone up|when the bells rang"""
)
_STATES = _listed(
    """was quiet|was full of people|looked different|seemed smaller than before|was closed
for repairs|smelled of soap|had been painted again|was covered with snow|stood empty|was
open until late|needed a new roof|was warm and bright|felt colder than usual|was known for
its view|had changed very little|was busy"""
)
_OPENERS = _listed(
    """In general|Of course|As a rule|By then|After a while|For that reason|Even so|
Now and then|At first|In the end|Meanwhile|On the whole|Besides|Later on|To be fair|Strangely"""
)


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One item, using nothing of `rng` but `random()`, whose sequence Python guarantees."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """The items in random order; see `pick` for why not `rng.shuffle`."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        out[i], out[j] = out[j], out[i]
    return out


def sentences(rng: random.Random) -> Iterator[str]:
    """Filler without end: capitalised, with full stops."""
    while True:
        match int(rng.random() * 5):
            case 0:
                text = f"{pick(rng, _PLACES)} {pick(rng, _STATES)} {pick(rng, _TIMES)}"
            case 1:
                text = f"{pick(rng, _PEOPLE)} {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
                text += f" {pick(rng, _TIMES)}"
            case 2:
                text = f"{pick(rng, _PEOPLE)} {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
                text += f" near {pick(rng, _PLACES)} {pick(rng, _REASONS)}"
            case 3:
                text = f"{pick(rng, _OPENERS)}, {pick(rng, _PLACES)} {pick(rng, _STATES)}"
            case _:
                text = f"{pick(rng, _OPENERS)}, {pick(rng, _PEOPLE)} went to {pick(rng, _PLACES)}"
                text += f" and {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
        yield text[0].upper() + text[1:] + "."
