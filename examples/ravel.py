"""Where does a language model keep a city's country, continent and language, each without the others?

    plot-ot check examples/ravel.py --hold-out entity
    RAVEL=path/to/ravel/data plot-ot localize examples/ravel.py --model google/gemma-2-2b --hold-out entity

With RAVEL's own files in the folder $RAVEL, its cities; else a few of ours. docs/ravel.md scores what is found.
"""

import os

from plot_ot.ravel import Ravel, read_ravel

ATTRIBUTES = ("Country", "Continent", "Language")
FACTS = """France Europe French: Paris Lyon Lille Nantes Nice Brest
Spain Europe Spanish: Madrid Seville Bilbao Malaga Toledo Murcia
Mexico America Spanish: Puebla Tijuana Merida Toluca Oaxaca Cancun
Canada America English: Toronto Calgary Ottawa Regina Halifax Windsor
Senegal Africa French: Dakar Thies Touba Kaolack Louga Matam
Nigeria Africa English: Lagos Kano Abuja Ibadan Jos Enugu"""
PROMPTS = {
    "Country": ("%s is a city in the country of", "The flag of %s is that of"),
    "Continent": ("%s is a city on the continent of", "A map shows %s in"),
    "Language": ("People in %s mostly speak", "Newspapers in %s are written in"),
}


def ours() -> Ravel:
    """A few cities in the form of RAVEL's."""
    lines = [line.split(": ") for line in FACTS.splitlines()]
    cities = {c: dict(zip(ATTRIBUTES, facts.split(), strict=True)) for facts, names in lines for c in names.split()}
    return Ravel(cities, PROMPTS)


data = read_ravel(os.environ["RAVEL"], "city", ATTRIBUTES) if os.environ.get("RAVEL") else ours()
hypothesis, inputs = data.hypothesis(), data.inputs(2000, seed=1000)
