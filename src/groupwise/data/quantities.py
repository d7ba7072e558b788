r"""Reading a short answer as a quantity: an exact number with its unit, a time of day, a ratio. Strings in, no floating point.

A wrong answer that is paid teaches worse than a right one that is missed. So a word after a number counts as its unit only where it
cannot change the number, and two quantities with different units are never equal.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

__all__ = [
    "Quantity",
    "changes_the_value",
    "colon_parts",
    "last_boxed",
    "plain_text",
    "quantities_equal",
    "read_quantity",
    "same_unit",
    "split_unit",
    "time_of_day",
]

LONGEST_NUMBER = 100
"""Characters; beyond this a text is not read as one number (and Python refuses to convert 4,300 digits)."""

# Digits are written out as [0-9] because \d also matches other scripts' digits.
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
UNSIGNED = rf"(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
SIGN = r"(?P<sign>[+-]?)\s?"
NUMBER = re.compile(rf"{SIGN}(?:(?P<whole>{DIGITS})\s(?=[0-9]+/))?(?P<value>{UNSIGNED})(?:\s?/\s?(?P<denominator>{DIGITS}))?")
FRACTION = re.compile(
    rf"{SIGN}(?P<whole>[0-9]+)?\s?\\[dtc]?frac\s?"
    r"(?:\{(?P<top>[+-]?[0-9]+)\}\s?(?:\{(?P<bottom>[0-9]+)\}|(?P<digit>[0-9]))|(?P<a>[0-9])\s?(?:(?P<b>[0-9])|\{(?P<c>[0-9]+)\}))"
)
REPEATING = re.compile(rf"{SIGN}(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\overline\s?\{{(?P<repeated>[0-9]+)\}}")
CURRENCY_BEFORE = re.compile(r"(?P<sign>[+-]?)\s?(?P<currency>[$€£¥₹])\s?(?P<rest>(?![€£¥₹]).*)", re.DOTALL)
DASHES = str.maketrans({"−": "-", "–": "-", "﹣": "-", "‐": "-", "‑": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
TEXT_COMMAND = r"\\(?:text|mbox|mathrm|textnormal|textrm|textbf|mathbf|operatorname|rm)\s?"
TRAILING_TEXT = re.compile(
    rf"(?P<body>.*?)(?:\\[ ,;!]|~|\s)*{TEXT_COMMAND}\{{(?P<words>[^{{}}]*)\}}\s?(?P<power>\^\{{?[23]\}}?)?\s?\.?", re.DOTALL
)
TRAILING_WORDS = re.compile(
    # Of units in two letters only those behind π that are no product of letters: not 2\pi in, nor 2\pi ft.
    r"(?P<body>.*?(?:[0-9)}\]]|(?:π|\\pi(?![A-Za-z]))"
    r"(?=[^A-Za-z]*(?:[A-Za-z]{3}|[cmk]m(?![A-Za-z])|(?:sq|cu)[. ]+(?:m|[A-Za-z]{2,})(?![A-Za-z])))))"
    r"(?P<space>(?:\\[ ,;!]|~|\s)*)(?P<words>[A-Za-z](?:[A-Za-z'/. -]*[A-Za-z])?)\s?(?P<power>\^\{?[23]\}?|[²³])?\.?",
    re.DOTALL,
)
POWER_WITHIN = re.compile(r"(?P<words>.*[A-Za-z.])\s?(?P<power>\^\s?\{?[23]\}?|[²³])\s*\.?\s*", re.DOTALL)
NO_UNIT = re.compile(r"[^A-Za-z\s./'-]|\b[ap]\.\s?m\b")
"""What stands in no unit that is read: digits, letters with a prefix's meaning as in ``μF``, the halves of a day."""
FORMULAS = re.compile(
    r"(?<![0-9\\$.])(?<!\\\))(?:(\$\$?)(?=[^\s$])((?:\\\$|[^$])*?)(?<=\S)(?<!\\)\1|\\\(((?:(?!\\[()]).)*)\\\))"
    r"(?![0-9$]|\.[0-9]|\\\()",
    re.DOTALL,
)
"""Between signs that open before and close behind what is no blank, as those of money, ``$5 and $6``, do not; and nothing that would
make one number with its neighbour, as in ``\\(5\\)6`` and ``$5$.$6$``."""
COMMA_OF_A_LIST = re.compile(r"(?:(?<=\$)|(?<=\\\))),(?=[$\\0-9])|,(?=(?:\$|\\\()[0-9]{3})")
"""Beside a formula, where it sets no thousands apart."""
PERCENT = re.compile(r"(?P<body>.*?)\s?\\?%\.?", re.DOTALL)
DEGREES = re.compile(r"\s?(?:\^\s?\\circ(?![A-Za-z])|\^\{\s?\\circ\s?\}|°)")
DEGREES_WITHIN = re.compile(rf"{DEGREES.pattern}\s*\.?[A-Za-z0-9]")
"""Something else than a unit: ``f°g``, ``30°15'``, ``30°N``."""
TRIGONOMETRIC = re.compile(r"(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])")
"""Degrees behind one of these belong to its argument."""
SCALE = re.compile(r"\s?(?:\\?\s)*(?:\\(?:text|mathrm)\{\s?)?([CF])\}?\.?")
TEXT_BEGUN = re.compile(rf"{TEXT_COMMAND}\{{\s*$")
RATE = re.compile(r"(?<=[0-9])\s?/\s?(?=[A-Za-z]{3})([A-Za-z]+)(?=\.?$)")
"""``5/hour``, but not ``5/h``, which may be a fraction."""
TEXT_PER_TEXT = re.compile(rf"({TEXT_COMMAND}\{{[^{{}}]*)\}}\s?/\s?{TEXT_COMMAND}\{{")
TOLD_IN_ALL = re.compile(r"\s+in (?:total|all)(?=\s*\}?\s*\.?$)")
NUMBER_WITHIN = re.compile(r"[0-9π]|\\pi(?![A-Za-z])")
WORD = re.compile(r"[A-Za-z]+")
DRESS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("“", "”"))
DRESSED = "".join({left[0] for left, _ in DRESS})
BRACE = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")
BOX = re.compile(r"\\boxed\s*\{")
ROUGHLY = re.compile(r"[^0-9A-Za-z~]*~")
"""A tilde before a number says "about"; behind one it is LaTeX's space."""

CHANGING_WORDS = frozenset(
    WORD.findall(
        """
    and or plus minus times over under above below more less fewer than of to out off from by into mod modulo remainder rem choose
    base root roots inverse inverses reciprocal reciprocals repeating recurring negative negatives prime factorial factorials
    opposite squared cubed twice thrice sine sines cosine cosines tangent cotangent secant cosecant logarithm logarithms exponent
    exponents exponential power powers modulus mods radical radicals squareds cubeds factor factors log logs neg negs
    decade decades century centuries
    half halves third thirds quarter quarters first firsts nth st nd rd th last
    mil mill mills mln mio bill bn bil bln tn trn tril lakh lakhs lac lacs crore crores cr arab arabs kharab kharabs wan gross grand
    pair pairs couple couples score scores brace few several many lots plenty twin twins trio trios duo duos dyad dyads triad triads
    tuple tuples triplicate duplicate bps ppm ppb permil permill permille permyriad percentile percentiles quartile quartiles decile
    deciles quintile quintiles
    hex hexa bin oct dec radix
    yocto zepto atto femto pico nano micro milli centi deci deca deka hecto kilo mega giga tera peta exa zetta yotta
    am pm noon midnight morning afternoon evening night oclock bc bce ad ce ago later before after early late sharp past hence
    today tomorrow yesterday tonight now then soon recently daily weekly monthly yearly annually hourly since until
    january february march april may june july august september october november december
    jan feb mar apr jun jul aug sep sept nov monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs
    fri sat sun
    wrong incorrect incorrectly false untrue invalid error none not no never nothing nil null nope nan undefined impossible unknown
    unsure yes true correctly okay ok
    approx approximate approximately approximation about around roughly nearly almost circa ca est estimate estimated estimation
    perhaps maybe probably possibly likely unlikely ish or so least most max maximum minimum maximal minimal upwards downwards
    rounded exclusive inclusive only exactly precisely otherwise instead sometimes always
    loss losses debt debts deficit deficits short quad quads complement complements negation negations
    """
    )
)
"""Words after a number that change its value or its meaning, or say that it is not meant: see ``changes_the_value``."""
COUNTED_ALL_THE_SAME = frozenset({"ads", "bills", "bins", "evenings", "kilos", "mornings", "nights", "shorts"})
"""Plurals of things, whose singular is spelt like one of those words."""
CHANGING_FORMS = re.compile(
    # Sizes, with their fractions, also misspelt: octillion, milions, millionths, hundreths, dozen, googolplex.
    r"[a-z]*ill(?:ion|iard)(?:s|ths?)?|(?:m|b|tr)i?l+i?ons?(?:ths?)?|(?:hundred|thousand)(?:s|ths?)?|(?:hundre|thousan)t?h?s|eigths?|[a-z]*dozens?|googol(?:plex)?(?:es|s)?|myriads?|"
    # Number words as counts, plurals and fractions: five, fives, fifths, fifteenths, twenties, twentieths.
    r"zero(?:e?s)?|(?:one|two|three|four|five|seven|eight|nine|ten|eleven|twelve)s?|six(?:es)?|"
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf)ths?|(?:thir|four|fif|six|seven|eigh|nine)teen(?:s|ths?)?|"
    r"(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:ys?|ies|ieths?)|"
    # Multipliers and groups: doubled, quintuples, triplets, octets, sevenfold.
    r"(?:doub|trip|quadrup|quintup|sextup|septup|octup|nonup|decup|centup|multip)le[sdt]?(?:s|on)?|"
    r"(?:du|quart|quint|sext|sept|oct|non)ett?e?s?|[a-z]*fold|"
    # Bases: binary, octal, hexadecimal, sexagesimal.
    r"(?:u|bi|ter|quater|qui|se|septe|octo|no|de|duode)nary|octals?|[a-z]*(?:decimal|gesimal)s?|[a-z]+hex"
)
FUNCTION_WORDS = frozenset({"pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp"})
"""Words after a number that are a part of the expression."""


def _table(groups: str) -> dict[str, str]:
    return {word: words.split()[0] for words in re.split(r"[|\n]", groups) for word in words.split()}


MEASURES = _table(
    """
    kilometer kilometers kilometre kilometres km kms | centimeter centimeters centimetre centimetres cm cms
    millimeter millimeters millimetre millimetres mm | meter meters metre metres m
    micrometer micrometers micrometre micrometres | microgram micrograms | microsecond microseconds
    microliter microliters microlitre microlitres | inch inches in | foot feet ft | yard yards yd yds | mile miles mi
    kilogram kilograms kg kgs | gram grams g gm gms | milligram milligrams mg | pound pounds lb lbs | ounce ounces oz | ton tons
    tonne tonnes | liter liters litre litres l | milliliter milliliters millilitre millilitres ml | gallon gallons gal
    quart quarts qt | pint pints pt
    second seconds secs s | minute minutes min mins | hour hours hr hrs h | day days | week weeks wk wks | month months
    year years yr yrs | dollar dollars usd buck bucks | cent cents | euro euros eur | pence penny pennies | yen jpy | rupee rupees inr
    degree degrees deg | radian radians rad | percent percentage pct | square sq | cubic cu | per | unit units | mph | kmh kph
    acre acres | celsius | fahrenheit | cup cups | joule joules | newton newtons | watt watts | volt volts | mpg | rpm | psi
    """
)
"""Every spelling of a unit of measure, and the one that stands for it."""
WITH_A_MICRO = {"m": "micrometer", "g": "microgram", "s": "microsecond", "L": "microliter", "l": "microliter"}
MICRO = re.compile(r"(?<![A-Za-z])[μµ]([mgsLl])(?![A-Za-z])")
"""The prefix in either of its code points, before a unit that it is read with."""
OTHERWISE_IN_CAPITALS = frozenset({"m", "g", "s", "h", "l", "mm", "mg", "ml", "gm", "gms"})
"""Spellings that mean another unit, or a million, in capitals: ``Mg`` is a tonne."""
PLURALS = _table(
    """
    person persons people | child children | man men | woman women | mouse mice | goose geese | tooth teeth | loaf loaves | leaf leaves
    knife knives | shelf shelves | wolf wolves | bus buses | gas gases | fish fishes | die dice
    """
)
ALL_TOLD = frozenset({"total", "altogether", "left", "remaining"})
"""Words that leave any number what it is."""
INVARIABLE = frozenset({"fish", "sheep", "deer", "cattle", "police"}) | ALL_TOLD
"""Plurals that are written as the singular is, and those words."""
BEHIND_A_MEASURE = frozenset({"old", "tall", "long", "wide", "deep", "high"}) | ALL_TOLD
"""Words that leave a measure what it is: 12 years old, 20 dollars left."""
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
_SIGNS_BEHIND = {**_CURRENCIES, "¢": "cent", '"': "inch"}
IN_INCHES = re.compile(r"(?:[^A-Za-z\\]|\\[A-Za-z]+)*[0-9)}\]]")
"""What may stand before inches; behind letters the sign is a prime or a quotation mark."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, and what it counts."""

    value: Decimal | Fraction
    unit: str | None = None
    """The unit in its normal form: singular, small letters; ``None`` where nothing was written."""
    words: int = 0
    """Words that the unit was written in."""
    tight: bool = False
    """Whether the word may be no unit, as a product of letters (``5m``, ``5km``) or a word in the singular behind a number that asks
    for the plural (``5 apple``, ``5 surd``): then it is one only beside the same unit."""


def changes_the_value(word: str) -> bool:
    """Whether ``word`` after a number changes its value or its meaning, so that the whole is not that number with a unit. So does the
    plural of one that does (``5 mils``), right or wrong."""
    word = word.lower()
    forms = {word}
    if word not in COUNTED_ALL_THE_SAME and word not in MEASURES:
        forms |= {word.removesuffix("s"), re.sub("(?<=[sxzh])es$", "", word)}
    return not CHANGING_WORDS.isdisjoint(forms) or CHANGING_FORMS.fullmatch(word) is not None


def plain_text(text: str) -> str:
    r"""The answer without markup that leaves an answer what it is: ``$...$``, ``**...**``, ``\$``, ``{,}``, unusual dashes and spaces."""
    text = _without_formulas(text.translate(DASHES).strip())
    undressed = None
    while text != undressed and text[:1] in DRESSED:
        undressed = text
        for left, right in DRESS:
            dressed = len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right)
            if dressed and not (left == '"' and '"' in text[1:-1]):
                text = text[len(left) : -len(right)].strip()
        if text.startswith("\\boxed") and text.endswith("}"):
            text = _unboxed(text)
    text = TOLD_IN_ALL.sub("", text.replace("{,}", ","))
    if "\\" in text:
        text = re.sub(r"\\!\s*", "", text.replace("\\$", "$").replace("\\%", "%"))
        text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", "", text)
    return text.strip()


def _without_formulas(text: str) -> str:
    r"""``5 cm`` for ``$5$ cm``; as it is where a dollar sign is left, which may stand for money as may all others."""
    if text.count("$") < 2 and "\\(" not in text:
        return text
    bare = FORMULAS.sub(lambda formula: formula[2] or formula[3], COMMA_OF_A_LIST.sub(", ", text))
    return text if "$" in bare.replace("\\$", "") or "\\(" in bare else bare


def last_boxed(text: str) -> str | None:
    """Content of the complete ``\\boxed{...}`` that begins last, in one pass over the braces."""
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in BRACE.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            open_braces.append(match.end())
        elif token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[last[0] : last[1]]


def _unboxed(text: str) -> str:
    """What is in the box that the text is; another text as it is."""
    within = last_boxed(text) or ""
    return within.strip() if within.strip() and BOX.fullmatch(text[: -len(within) - 1]) else text


def split_unit(text: str) -> tuple[str, str | None, int, bool]:
    r"""What ``text`` (as ``plain_text`` gave it) measures and in what: body, unit, the unit's words, and whether the unit is tight
    (see ``Quantity``).

    The unit is ``""`` where a word follows that changes the value, and ``None`` where there is none.
    """
    text = RATE.sub(_per, TEXT_PER_TEXT.sub(r"\1/", text.strip())) if "/" in text else text.strip()
    currency = CURRENCY_BEFORE.fullmatch(text)
    if currency and (rest := currency["rest"]) and "$" not in rest:
        body, unit, words, _ = split_unit(rest)
        name = _CURRENCIES[currency["currency"]]
        unit = name if unit in (None, name) or unit in ALL_TOLD else f"{name} {unit}" if unit.startswith("per ") else ""
        both_signs = currency["sign"] and body[:1] in "+-"
        return currency["sign"] + body, "" if both_signs else unit, max(words, 1), False
    measured = text[:-1].rstrip()
    if text[-1:] in _SIGNS_BEHIND and measured and "$" not in measured and (text[-1] != '"' or IN_INCHES.fullmatch(measured)):
        return measured, _SIGNS_BEHIND[text[-1]], 1, False
    if percent := PERCENT.fullmatch(text):
        return percent["body"], "percent" if "%" not in percent["body"] else "", 1, False
    if (degrees := DEGREES.search(text)) and not TRIGONOMETRIC.search(text[: degrees.start()]):
        if scale := SCALE.fullmatch(text[degrees.end() :]):
            body = TEXT_BEGUN.sub("", text[: degrees.start()])  # \text{°C}
            return body.rstrip(), {"C": "celsius", "F": "fahrenheit"}[scale[1]], 1, False
        if DEGREES_WITHIN.search(text):
            return text, None, 0, False
        return DEGREES.sub(" ", text).strip().removesuffix(".").rstrip(), "degree", 1, False
    if (match := TRAILING_TEXT.fullmatch(text)) and NUMBER_WITHIN.search(match["body"]):
        unit, named, body = _unit_of(match["words"], match["power"]), WORD.findall(match["words"]), match["body"].strip()
        return (text, None, 0, False) if unit is None else (body, unit, len(named), unit != "" and not _counted(named, body))
    match = TRAILING_WORDS.fullmatch(text)
    return (text, None, 0, False) if match is None else _split_words(text, match)


def _per(rate: re.Match[str]) -> str:
    return f" per {rate[1]}" if rate[1].lower() in MEASURES else rate[0]


def _split_words(text: str, match: re.Match[str]) -> tuple[str, str | None, int, bool]:
    """``split_unit`` where bare words follow: several only where each is known, one that is not known only behind a number."""
    body, named = match["body"], match["words"]
    *before, last = words = WORD.findall(named)
    measured = bool(before) and all(word.lower() in MEASURES for word in before)
    if last.lower() in (BEHIND_A_MEASURE if measured else ALL_TOLD if len(before) == 1 else ()):
        named, words = named.removesuffix(last).rstrip(), before
    known = all(word.lower() in MEASURES for word in words)
    word = words[0]
    if not match["space"] or (len(words) == 1 and len(word) == 1):
        if known and len(words) == 1 and (word.islower() or word == "L"):
            return body, _unit_of(word, match["power"]), 1, True
        changes = not match["space"] and word.lower() in ("st", "nd", "rd", "th", "am", "pm")
        return (body, "", 1, False) if changes else (text, None, 0, False)
    if any(word.lower() in FUNCTION_WORDS for word in words):
        return text, None, 0, False
    if any(changes_the_value(word) for word in words):
        return body, "", len(words), False
    noun = (
        len(words) == 1
        and not match["power"]
        and len(word) > 2
        and not word.isupper()
        and bool(re.search("[aeiouyAEIOUY]", word))
    )
    if known or (noun and _number(body) is not None):
        return body, _unit_of(named, match["power"]), len(words), not _counted(words, body)
    return text, None, 0, False


def _counted(words: list[str], body: str) -> bool:
    """Whether ``words`` are known measures, or stand in the number that ``body`` asks for: the plural, but behind one or a part of it."""
    lower = [word.lower() for word in words]
    if all(word in MEASURES for word in lower) or any(_singular(word) != word or word in INVARIABLE for word in lower):
        return True
    value = _number(body)
    return value is not None and abs(Fraction(value)) <= 1


def _unit_of(text: str, power: str | None) -> str | None:
    """The unit in its normal form; ``""`` where a word changes the value or is not read; ``None`` where there are no words."""
    if power is None and (within := POWER_WITHIN.fullmatch(text)):
        text, power = within["words"], within["power"]
    text = MICRO.sub(lambda unit: WITH_A_MICRO[unit[1]], text)
    if any(
        word.lower() in OTHERWISE_IN_CAPITALS and not word.islower() and word not in ("L", "mL") for word in WORD.findall(text)
    ):
        return ""
    text = text.lower().replace("/", " per ")
    words = WORD.findall(text)
    if not words:
        return "" if power or text.strip(" .") else None
    if NO_UNIT.search(text) or any(changes_the_value(word) for word in words):
        return ""
    if len(words) == 1 and len(words[0]) == 1 and words[0] not in MEASURES:
        return ""
    names = [_singular(word) for word in words]
    if power:  # of metres per second squared it is the seconds'
        place = len(names) - names[::-1].index("per") if "per" in names else 0
        names.insert(place, "square" if power.strip("^{} ") in "2²" else "cubic")
    joined = " ".join(names).replace("mph", "mile per hour").replace("kmh", "kilometer per hour")
    return joined.replace("degree celsius", "celsius").replace("degree fahrenheit", "fahrenheit")


def _singular(word: str) -> str:
    if word in MEASURES or word in PLURALS:
        return MEASURES.get(word) or PLURALS[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes", "zes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 2 else word


def same_unit(left: str | None, right: str | None) -> bool:
    """Whether quantities so measured can be compared: in one unit, or one of them without any. ``""`` compares with nothing."""
    return left != "" and right != "" and (left is None or right is None or left == right)


def read_quantity(text: str) -> Quantity | None:
    r"""The quantity that ``text`` is, exactly, or ``None`` where it is anything else.

    Read are signs, thousands separators, decimals, a trailing period, ``a/b``, ``1 1/2``, ``\frac{a}{b}``, ``1\frac{1}{2}``,
    ``0.\overline{3}``, and before or after them a unit: ``$``, ``%``, degrees, a word behind a space, known units of measure, and
    what stands in ``\text{}``. A percent sign is a unit: ``50%`` is 50 percent, and not 1/2.
    """
    return None if len(text) > LONGEST_NUMBER else _read_quantity(text)


@functools.lru_cache(maxsize=1024)  # a reference, and what many completions of a group answer, are each read several times
def _read_quantity(text: str) -> Quantity | None:
    text = plain_text(text)
    if ROUGHLY.match(text):
        return None
    text = re.sub(r"\\[, ;]|~", " ", text)
    value = _number(text)
    if value is not None:
        return Quantity(value)
    body, unit, words, tight = split_unit(text)
    value = None if unit in (None, "") else _number(body)
    return None if value is None else Quantity(value, unit, words, tight)


def _number(text: str) -> Decimal | Fraction | None:
    text = text.strip().removesuffix(".").strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    if match := NUMBER.fullmatch(text):
        value = Decimal(match["value"].replace(",", ""))
        if match["denominator"] is None:
            return value.copy_negate() if match["sign"] == "-" and value else value
        return _signed(match, match["whole"], Fraction(value), match["denominator"])
    if match := FRACTION.fullmatch(text):
        top, bottom = match["top"] or match["a"], match["bottom"] or match["digit"] or match["b"] or match["c"]
        if match["whole"] and top.startswith(("+", "-")):
            return None
        return _signed(match, match["whole"], Fraction(int(top)), bottom)
    if match := REPEATING.fullmatch(text):
        fixed, repeated = match["fixed"], match["repeated"]
        digits = Fraction(int(fixed + repeated) - int(fixed or 0), (10 ** len(repeated) - 1) * 10 ** len(fixed))
        return (-1 if match["sign"] == "-" else 1) * (int(match["whole"] or 0) + digits)
    return None


def _signed(match: re.Match[str], whole: str | None, top: Fraction, denominator: str) -> Fraction | None:
    bottom = int(denominator.replace(",", ""))
    if bottom == 0:
        return None
    return (-1 if match["sign"] == "-" else 1) * (int((whole or "0").replace(",", "")) + top / bottom)


def quantities_equal(left: Quantity, right: Quantity) -> bool:
    """The same number in the same unit, or one of them without a unit."""
    if Fraction(left.value) != Fraction(right.value) or not same_unit(left.unit, right.unit):
        return False
    return left.unit == right.unit or not (left.tight or right.tight)


def time_of_day(text: str) -> tuple[tuple[int, ...], str] | None:
    """Hours, minutes and seconds of ``3:30 pm`` and ``3 p.m.``, and ``am`` or ``pm``; ``None`` for what names no half of a day."""
    bare = re.sub(rf"{TEXT_COMMAND}|[{{}}~]|\\[ ,;!]", " ", plain_text(text).replace("\\!", ""))
    bare = " ".join(bare.split()).lower()
    match = re.fullmatch(r"([0-9]{1,2})((?: ?: ?[0-9]{2}){0,2}) ?(?:([ap]) ?\.? ?m ?\.?)", bare)
    if not match:
        return None
    clock = [int(match[1]), *(int(part) for part in match[2].replace(" ", "").split(":")[1:])]
    while len(clock) > 1 and clock[-1] == 0:
        clock.pop()
    return tuple(clock), match[3] + "m"


def colon_parts(text: str) -> list[str] | None:
    """The parts of a ratio or a clock time, ``3:5`` or ``05:00``; ``None`` where no colon stands outside brackets."""
    parts, depth, begin = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "({[") - (sign in ")}]")
        if sign == ":" and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()] if parts else None
