"""The alphabets facts are made of. Standard library only.

A key is an adjective and a noun ("amber falcon"), a value a number of three digits.
The tokenizer is trained so that every one of these words, with the space before it, is
one token. Filler (see `filler.py`) uses none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Alphabet:
    """How many of the words may be used: the curriculum starts small."""

    adjectives: int = len(ADJECTIVES)
    nouns: int = len(NOUNS)
    values: int = len(VALUES)


ALL = Alphabet()
