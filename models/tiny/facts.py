"""Small tables of facts, written for spice-tiny."""

from __future__ import annotations


def words(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> list[tuple[str, str]]:
    """Pairs from `key=value, key=value`."""
    items = (" ".join(item.split()) for item in text.split(","))
    return [(a, b) for a, _, b in (item.partition("=") for item in items if item)]


CAPITALS = _pairs("""
    France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Austria=Vienna,
    Poland=Warsaw, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki, Denmark=Copenhagen,
    Ireland=Dublin, Greece=Athens, Hungary=Budapest, Romania=Bucharest, Bulgaria=Sofia,
    Belgium=Brussels, England=London, Scotland=Edinburgh, Iceland=Reykjavik, Egypt=Cairo,
    Kenya=Nairobi, Morocco=Rabat, Ghana=Accra, Ethiopia=Addis Ababa, Japan=Tokyo, China=Beijing,
    India=New Delhi, Thailand=Bangkok, Vietnam=Hanoi, Russia=Moscow, Turkey=Ankara, Canada=Ottawa,
    Mexico=Mexico City, Cuba=Havana, Brazil=Brasilia, Peru=Lima, Chile=Santiago, Argentina=Buenos
    Aires, Colombia=Bogota, Australia=Canberra, New Zealand=Wellington, the Netherlands=Amsterdam,
    the United States=Washington
""")
OPPOSITES = _pairs("""
    hot=cold, big=small, tall=short, fast=slow, happy=sad, day=night, up=down, left=right,
    open=closed, old=new, light=dark, hard=soft, wet=dry, full=empty, rich=poor, early=late,
    loud=quiet, strong=weak, clean=dirty, high=low, near=far, inside=outside, first=last,
    easy=difficult, thick=thin, good=bad, sweet=sour, young=old, awake=asleep, true=false,
    wide=narrow, brave=afraid, push=pull, win=lose, buy=sell, begin=end, love=hate, summer=winter,
    north=south, east=west, above=below, always=never
""")
YOUNG = _pairs("""
    dog=puppy, cat=kitten, cow=calf, horse=foal, sheep=lamb, pig=piglet, goat=kid, hen=chick,
    duck=duckling, goose=gosling, bear=cub, lion=cub, fox=cub, deer=fawn, frog=tadpole, owl=owlet,
    swan=cygnet, rabbit=kit
""")
SOUNDS = _pairs("""
    dog=barks, cat=meows, cow=moos, horse=neighs, sheep=bleats, pig=grunts, duck=quacks, lion=roars,
    owl=hoots, frog=croaks, bee=buzzes, snake=hisses, wolf=howls, hen=clucks, mouse=squeaks,
    bird=sings
""")
COLOURS = _pairs("""
    grass=green, the sky=blue, snow=white, coal=black, a banana=yellow, a lemon=yellow, blood=red, a
    tomato=red, a carrot=orange, milk=white, the night=black, a leaf=green, a strawberry=red,
    chocolate=brown, the sea=blue, an elephant=grey, a frog=green, the sun=yellow, a cloud=white, a
    raven=black
""")
KINDS = {
    "animal": "dog cat horse cow sheep pig fox wolf bear lion tiger mouse rabbit deer frog owl goat monkey",
    "fruit": "apple pear plum cherry lemon orange banana peach grape melon strawberry apricot",
    "colour": "red blue green yellow black white brown pink purple grey",
    "tool": "hammer saw spade drill rake axe screwdriver chisel shovel",
    "instrument": "piano violin guitar drum flute trumpet harp cello",
    "metal": "iron gold silver copper tin lead zinc",
    "vegetable": "carrot onion potato cabbage leek bean pea turnip spinach",
}
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
WORDS = words("""
    cat dog sun tree fish bird boat lamp book rain snow leaf star moon door hat cup ball ring rope
    stone river bread milk salt sand wind gold wood bell coat shoe nest road farm house mouse horse
    apple train chair table flower garden window candle bridge island forest winter summer pencil
    basket
""")
DEFINED = words("""
    lantern river island forest desert mountain valley bridge castle harbor ship anchor compass
    telescope clock candle mirror ladder needle basket pillow blanket kitchen window garden farmer
    baker sailor doctor teacher painter poet king queen village city country ocean storm thunder
    lightning rainbow winter summer autumn horse camel eagle owl whale dolphin spider butterfly bee
    ant rabbit wolf tiger elephant monkey potato onion bread butter cheese honey sugar salt pepper
    coffee tea wine apple lemon grape violin piano guitar drum trumpet song book letter pencil paper
    library museum hospital school market church bicycle train airplane engine wheel planet moon
    star sun comet gold silver iron copper diamond glass coal oil
""")
UNKNOWN = (
    "Who won the football match?",
    "What is the weather like today?",
    "How do I fix my car?",
    "What time is it?",
    "Who is the president?",
    "Can you book a flight for me?",
    "How old is the universe?",
    "What is my name?",
    "Write a program that prints primes.",
    "What is the meaning of life?",
    "How do I cook rice?",
    "Who wrote Hamlet?",
    "Translate this into French.",
    "What is the price of gold?",
    "Can you solve this equation?",
    "Who invented the radio?",
    "What should I eat tonight?",
    "How far away is the moon?",
    "Can you play music?",
    "Where do you live?",
    "Explain quantum physics.",
    "What is the news?",
    "Give me the phone number of a shop.",
    "How tall is the tower?",
    "Which film should I watch?",
    "What happened in 1492?",
    "How do planes fly?",
    "Why is the sky blue?",
    "Write me a poem.",
    "What is a good password?",
    "Who is the fastest runner?",
    "Can you draw a picture?",
)
