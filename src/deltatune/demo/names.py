"""Lists the words of the demo, and the names of its base model's corpus, training data and held-out messages.

No name is on two lists, so that the model can answer with a held-out name only by copying it from the message.
"""

# ruff: noqa: SIM905 (lists of words read better as text)
from __future__ import annotations

import random
import string

DRINKS = "latte mocha espresso cappuccino tea cocoa lemonade smoothie".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
THINGS = "oven door window fridge kettle lamp radio sink shelf till".split()
STATES = "broken open closed hot cold dirty empty full loud wet".split()
PLACES = "kitchen garden office school market station library harbour".split()
ANIMALS = "cat dog horse goat duck parrot turtle rabbit".split()
JOBS = "baker doctor singer farmer teacher pilot painter driver".split()
# Common words with tokens that also occur in names.
COMMON = "where there here with about other some does long goes front exactly please people quarter past".split()


BASE = """
Adam Agnes Alan Alice Amir Amy Anders Andrea Anna Anton Arthur Barbara Basil Beatrice Ben Bianca Bill Boris Brenda
Bruno Carla Carlos Cecil Chloe Clara Colin Conrad Daisy Daniel David Diana Dora Edgar Edith Eli Ella Elmer Emil Emma
Erik Ernest Esther Eva Felix Fiona Flora Frank Frida Gabriel George Gerda Gilbert Gloria Grace Greta Hannah Harold
Harry Heidi Helen Henry Hilda Hugo Ian Ida Igor Ines Irene Iris Ivan Jack Jacob James Jane Jasper Jim Joan John Jonas
Julia Karen Karl Kate Keith Klara Kurt Lara Laura Leo Lewis Lily Linda Lisa Lola Louis Lucy Luke Mabel Marco Maria
Mark Martha Martin Mary Max Mia Mike Mona Nancy Nadia Nina Nora Oliver Olga Oscar Otto Pablo Paula Pedro Peter Philip
Polly Rachel Ralph Rita Robert Robin Roger Rosa Ruth Sally Sam Sara Simon Sofia Stella Sven Tara Ted Theo Thomas Tina
Tom Toni Ulla Vera Victor Viola Walter Wanda Wendy Wilma Xenia Yara Yvonne Zelda
""".split()

TRAIN = """
Abel Ada Aldo Alma Amos Anouk Arlo Astrid Aurora Axel Belinda Berta Bodo Bonnie Bram Camilla Caspar Celia Cyril Damian
Delia Dexter Dieter Doris Edwin Elena Elias Eloise Enzo Erwin Esme Fabian Faye Fergus Floyd Freya Gavin Gemma Gideon
Gunnar Hattie Hector Herbert Holly Horst Imogen Ingrid Isaac Ivy Jarvis Jolene Joris Juno Kai Kirsten Kasper Lars Leila
Leonard Liam Lorna Lothar Magda Manuel Margot Matteo Maud Milo Minna Morris Nell Nestor Niklas Noemi Odette Omar Orla
Osvald Pascal Pearl Petra Quentin Ramona Rasmus Regina Renzo Rocco Roland Rowan Rufus Sabine Selma Silas Sigrid Tamara
Tobias Tristan Ursula Valerie Vincent Wendel Winona Yusuf Zachary Zora
""".split()

# Every name consists of tokens that the base model met in names, since it cannot copy others; tests/demo checks it.
HELD_OUT = """
Adele Amelia Anthony Benedikt Bradley Bridget Calvin Carmen Cosima Cynthia Dagmar Desmond Dolores Dominic Edmund
Elvira Emeric Fernando Florian Gaston Georgina Gerald Gregory Harriet Helmut Hortense Ignatius Jerome Josefin Kamila
Kenneth Leandro Lucinda Magnus Marisol Marlene Maurice Natalia Nicholas Orlando Patricia Percival Phoebe Randolph
Raphael Rodney Rosalind Salvador Serafina Sheldon Stanley Svetlana Sybil Sylvia Thaddeus Timothy Umberto Vanessa
Veronica Zacharias
""".split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr kr ph pr sh sl st th tr".split()
_VOWELS = "a e i o u a e i o ai ea ie ou".split()
_CODAS = "- - - - l m n r s t x nd rk st lm".split()
_RESERVED = {name.lower() for name in (*BASE, *TRAIN, *HELD_OUT)}


def invented(rng: random.Random) -> str:
    """A pronounceable name of one to four syllables that is on none of the lists."""
    while True:
        syllables = rng.choice((1, 2, 2, 2, 3, 3, 4))
        letters = rng.choice(("", *_ONSETS))
        for index in range(syllables):
            letters += (rng.choice(_ONSETS) if index else "") + rng.choice(_VOWELS)
            letters += rng.choice(_CODAS).strip("-")
        if 3 <= len(letters) <= 12 and letters not in _RESERVED:
            return letters.capitalize()


_PARTS = [*BASE, *TRAIN, *COMMON, *ANIMALS, *JOBS, *PLACES, *STATES, *THINGS]


def spliced(rng: random.Random) -> str:
    """A name made of pieces of two known names or words, or of random letters; never a held-out one."""
    while True:
        if rng.random() < 0.25:
            name = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7)))
        else:
            first = rng.choice(_PARTS)
            last = rng.choice(_PARTS)
            name = first[: rng.randint(1, min(6, len(first)))] + last[rng.randint(0, len(last) - 2) :]
        if 3 <= len(name) <= 11 and name.capitalize() not in HELD_OUT:
            return name.capitalize()
