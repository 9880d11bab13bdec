"""Reading numbers: German answers, English gold."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.mgsm.german_numbers import MAX_DIGITS, Reading, read_answer, read_gold, write_value

UNAMBIGUOUS = {
    "18": "18",
    "18.": "18",
    "18,00": "18",
    "18,-": "18",
    "3,5": "3.5",
    "0,125": "0.125",
    "1234,567": "1234.567",
    "2.125": "2125",
    "1.000.000": "1000000",
    "2.125,50": "2125.5",
    "1.000,000": "1000",
    "2\u00a0125": "2125",
    "2\u202f125": "2125",
    "2\u2009125,50": "2125.5",
    "2'125": "2125",
    "70\\,000": "70000",
    "3{,}5": "3.5",
    "007": "7",
    "18 €": "18",
    "€18": "18",
    "US$ 18": "18",
    "18%": "18",
    "18kg": "18",
    "**18**": "18",
    "_18_": "18",
    "$18$": "18",
    "Das macht 18 Euro.": "18",
    "Erst 7, dann 9, am Ende 18!": "18",
    "12 : 3 = 4": "4",
    "Am 1.5.2024 waren es 18 Stück": "18",
    "18 Stück um 10:30": "18",
    "18 (also 1/2 von allem)": "18",
    "18 m²": "18",
    "18 bei A4 und CO2 und v1.5": "18",
}
AMBIGUOUS = {
    "2,125": "2.125",
    "12,125": "12.125",
    "1,000,000": "1000000",
    "12.5": "12.5",
    "0.125": "0.125",
    "1234.567": "1234.567",
    "2,125.50": "2125.5",
    "2'125.50": "2125.5",
    "2 125": "2125",
    "2,5 \u00b1 0,5": "0.5",
    "1 000 000,5": "1000000.5",
}
NEGATIVE = (
    "-5", "−5", "–5", "(-5)", "**-5**", "$-5$", "-€5", "\\boxed{-5}", "Es sind -5 Grad", "x = -5", "x=-5", "= - 5",
    "Antwort: -5", "Antwort:-5", "Antwort: - 5", "**Antwort:** − 5", "<answer>-5</answer>", "3 · -5", "10\n-5",
)  # fmt: skip
NOT_NEGATIVE = (
    "10-5", "10–5", "10 - 5", "10 -5", "10 − 5", "10% -5", "(3)-5", "(3) -5", "U-5", "Klasse-5", "- 5", "Kosten - 5",
    "Antwort:\n- 5", "**Kosten** - 5", "x²-5", "x² -5", "--5", "x-5", "10\u00a0-5", "10 minus 5", "10 Euro minus 5",
)  # fmt: skip
UNREADABLE = (
    "", "achtzehn", "1.2.3", "10:30", "1/2", "10^3", "1,2,3", "1.000.5", "1,000,5", "A4", "v1.5", "5²", "１８", "٣",
    "1８", "0x1F", "√16", "\\sqrt{16}", "\\frac{1}{2}", "1e40", "½", "1" * (MAX_DIGITS + 1), "1" + ".000" * 10, "Antwort: ZAHL", "\\boxed{}",
)  # fmt: skip


# What stands beside a marked number, where it leaves the answer as it is.
BESIDE = {
    "Antwort: 12 (12 · 3 = 36 ✓)": "12",
    "Antwort: **18** (= 9 · 2)": "18",
    "Antwort: 18(= 9 · 2)": "18",
    "Antwort: 18 (= (4 + 5) · 2)": "18",
    "Antwort: 18 [Probe: 20 - 2 = 18]": "18",
    "Antwort: 60 (= 1 h)": "60",
    "Antwort: 18 (nicht 20)": "18",
    "**18** (= 9 · 2)": "18",
    "18 = 2 * 9": "18",
    "Antwort: 18 = 2 * 9": "18",
    "Antwort: 18 = 20 - 2": "18",
    "\\boxed{18} = 2 \\cdot 9": "18",
    "9 · 2 = \\boxed{18}": "18",
    "Schritt 3: \\boxed{18}": "18",
    "Antwort: 9 € * 2 = 18 €": "18",
    "Antwort: 3 Kinder mit je 6 Äpfeln = 18 Äpfel": "18",
    "Antwort: 20 % von 90 = 18": "18",
    "Antwort: 9 mal 2 ist 18": "18",
    "Antwort: 36 : 2 = 18 Euro": "18",
    "Antwort: (4 + 5) · 2 = 18": "18",
    "Antwort: 2(4 + 5) = 18": "18",
    "Antwort: \\[ 9 \\times 2 = 18 \\]": "18",
    "Antwort: 1/2 = 0,5": "0.5",
    "Antwort: 2^3 = 8": "8",
    "Antwort: \\sqrt{16} = 4": "4",
    "Antwort: 10/3 ≈ 3,33": "3.33",
    "Antwort: Preis = 18 €": "18",
    "Antwort: 18, denn 20 - 3 = 17": "18",
    "Antwort: 18, also 9 · 2": "18",
    "Antwort: 18 ✓ 9 · 3 = 27": "18",
    "Antwort: 18 ✅": "18",
    "Antwort: 18 Euro in 3 Tagen": "18",
    "Antwort: 18 von 20 Kindern": "18",
    "Antwort: 18 Stück à 3 €": "18",
    "Antwort: 18 Euro. 20 waren es.": "18",
    "Antwort: 18 km/h": "18",
    "Antwort: ca. 18 Euro": "18",
    "Antwort: insgesamt etwa 18": "18",
    "Antwort: CHF 2'125.–": "2125",
    "Antwort: 18,- €": "18",
    "<answer>18</answer> = 9 · 2": "18",
    "Antwort: 18 Euro\n20 - 3 = 17": "18",
}
# Where it could be another value.
DOUBTED = {
    "Antwort: 7 oder 8": "7", "Antwort: 7 Euro oder 8 Euro": "7", "Antwort: 7 (oder 8)": "7", "Antwort: 7 bzw. 8": "7",
    "Antwort: 7 bis 8": "7", "Antwort: 7-8": "7", "Antwort: 7–8": "7", "Antwort: 7 … 8": "7", "Antwort: 7...8": "7",
    "Antwort: zwischen 7 und 8": "7", "Antwort: 7 und 8": "7", "Antwort: 7 Äpfel und 8 Birnen": "7",
    "Antwort: 7; 8": "7", "Antwort: 7, 8": "7", "Antwort: 7, nein 8": "7", "Antwort: 7, also 8": "7",
    "Antwort: ±5": "5", "Antwort: \\pm 5": "5", "Antwort: +/- 5": "5", "Antwort: 5 ± 1": "5", "±5": "5",
    "Antwort: 3+4": "3", "Antwort: 12 - 5": "12", "Antwort: 9 mal 2": "9", "Antwort: 9 * 2 =": "9",
    "Antwort: 1) 18": "1", "Antwort: 3 h 20 min": "3", "Antwort: 3 Stunden und 20 Minuten": "3", "Antwort: 18 € 50": "18",
    "Antwort: 60 min = 1 h": "60", "Antwort: 18,4 ≈ 18": "18.4", "Antwort: 18,4 (≈ 18)": "18.4",
    "Antwort: 18 = 9 · 2 = 17": "17", "Antwort: 3 + 6 = 9, 9 * 2 = 18": "18", "Antwort: 9 · 2 = 18 oder 20": "18",
    "Antwort: mindestens 5": "5", "Antwort: > 5": "5", "Antwort: \\geq 5": "5", "Antwort: 18. Mai 2024": "18",
    "7 oder \\boxed{8}": "8", "7 bis \\boxed{8}": "8", "2 \\cdot \\boxed{9}": "9", "mindestens \\boxed{5}": "5",
    "\\boxed{9} \\cdot 2 = 18": "9", "\\boxed{7} oder 8": "7", "<answer>7</answer> oder 8": "7", "7 oder 8": "8",
    "Antwort: 3 Dutzend": "3", "Antwort: 5k": "5000", "Antwort: .5": "0.5", "Antwort: 5 1/3": "5",
    "Von 40.\nAntwort: 1/2": "40",
}  # fmt: skip
# Numbers of several parts, marked or not.
PARTS = {
    "1e3": "1000", "1,5E3": "1500", "25e-1": "2.5", "2·10^3": "2000", "2 \\cdot 10^{3}": "2000", "2 × 10³": "2000",
    "1,5 * 10**6": "1500000", "5 1/2": "5.5", "5½": "5.5", "5 ¾": "5.75", "5\\frac{1}{2}": "5.5", "5 1⁄4": "5.25",
    "2 Mio.": "2000000", "2 Millionen Euro": "2000000", "2,5 Mio. €": "2500000", "**2** Mio.": "2000000",
    "1 Million": "1000000", "3 Mrd.": "3000000000", "3 Tausend": "3000", "3 Tsd. €": "3000", "3 Hundert": "300",
    "2 \\text{ Mio.}": "2000000", "minus 5": "-5", "Minus 5 Grad": "-5", "minus **5**": "-5", "-**5**": "-5",
    "minus 2 Mio.": "-2000000", "\u22125": "-5", "\u20115": "-5", "2\u2005125": "2125", "2‘125": "2125", "2\\;125": "2125",
    "18\u200b": "18", "<b>18</b>": "18", "\\(18\\)": "18", "18 Prozent": "18", "18 °C": "18", "18 m²": "18",
}  # fmt: skip


def value(text: str) -> Decimal | None:
    return read_answer(text).value


@pytest.mark.parametrize(("text", "wanted"), UNAMBIGUOUS.items())
def test_reads_what_german_means(text, wanted):
    assert read_answer(text) == Reading(Decimal(wanted), False)


@pytest.mark.parametrize(("text", "wanted"), AMBIGUOUS.items())
def test_flags_what_english_might_mean_and_still_reads_it(text, wanted):
    assert read_answer(text) == Reading(Decimal(wanted), True)


@pytest.mark.parametrize(("text", "wanted"), BESIDE.items())
def test_what_stands_beside_an_answer_is_read_with_it(text, wanted):
    assert read_answer(f"Von 40 ausgehend.\n{text}") == Reading(Decimal(wanted), False)


@pytest.mark.parametrize(("text", "wanted"), DOUBTED.items())
def test_what_could_be_another_value_is_ambiguous(text, wanted):
    assert read_answer(text) == Reading(Decimal(wanted), True)


@pytest.mark.parametrize(("text", "wanted"), PARTS.items())
@pytest.mark.parametrize("carrier", ["{}", "Antwort: {}", "Antwort: {} (= 3 + 4)\n7", "\\boxed{{{}}}", "Das macht {}."])
def test_a_number_of_several_parts_is_one(text, wanted, carrier):
    assert read_answer(carrier.format(text)) == Reading(Decimal(wanted), False)


@pytest.mark.parametrize("text", NEGATIVE)
def test_a_touching_minus_is_a_sign(text):
    assert value(text) == -5


@pytest.mark.parametrize("text", NOT_NEGATIVE)
def test_subtractions_ranges_hyphens_and_bullets_are_not_signs(text):
    assert value(text) == 5


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_number_has_no_value(text):
    assert read_answer(text) == Reading(None, False)


@pytest.mark.parametrize(
    "marked",
    [
        "Antwort: 18",
        "Die Antwort ist 18.",
        "Die Antwort lautet: **18**",
        "Die Antwort beträgt 18 Euro",
        "**Antwort:** 18",
        "**Antwort**: 18",
        "Endantwort: 18",
        "ANTWORT = 18",
        "Antwort:\n\n18",
        "Antwort: EUR 18",
        "Antwort: 9 * 2 = 18 Euro",
        "Antwort: 3 + 6 = 9 = 18 / 2 = 18",
        "Antwort: $\\boxed{18}$",
        "<answer>18</answer>",
        "\\boxed{18}",
        "\\boxed{\\text{18 Euro}}",
        "\\boxed{9 \\times 2 = 18}",
    ],
)
def test_a_marked_answer_precedes_the_last_number(marked):
    assert read_answer(f"Von 40 ausgehend. {marked}\nProbe: es bleiben 22 übrig.") == Reading(Decimal(18), False)


@pytest.mark.parametrize(
    "text", ["Antwort: ZAHL. Es sind 18", "\\boxed{\\frac{1}{2}} oder 18", "Ich beantworte 7 Fragen mit 18"]
)
def test_a_mark_without_a_number_behind_it_is_none(text):
    assert read_answer(text) == Reading(Decimal(18), False)


def test_what_stands_beside_a_calculation_does_not_replace_the_answer():
    assert value("Antwort: 18, denn 20 - 3 = 17") == 18
    assert value("Antwort: 18 (mit x = 2)") == 18


def test_the_last_marked_answer_counts_and_different_ones_are_ambiguous():
    assert read_answer("Antwort: 7\nAntwort: 18") == Reading(Decimal(18), True)
    assert read_answer("\\boxed{18}\nAntwort: 18,0") == Reading(Decimal(18), False)


def test_a_marked_ambiguous_number_is_ambiguous():
    assert read_answer("Antwort: 2,125") == Reading(Decimal("2.125"), True)


def test_separate_numbers_are_not_joined_by_spaces():
    assert value("1 2 3") == 3
    assert value("5 100 25") == 25
    assert value("2024 125") == 125
    assert value("0 125") == 125


@pytest.mark.parametrize(("text", "wanted"), {"18": 18, "2,125": 2125, "1,276,000": 1_276_000, "-5": -5}.items())
def test_reads_gold_answers(text, wanted):
    assert read_gold(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "2.125", "3,5", "1,00", "18 Euro", "1_000", "１８", "+5", "−5", "1" * 31, "0,125"]
)
def test_refuses_what_is_no_gold_answer(text):
    with pytest.raises(ValueError, match="not an integer"):
        read_gold(text)


def test_reads_every_shared_gold_answer(shared):
    rows = (shared / "data" / "mgsm" / "mgsm_de.tsv").read_text().splitlines()
    golds = [read_gold(row.split("\t")[1]) for row in rows]
    assert len(golds) == 250
    assert {Decimal(2125), Decimal(114_200), Decimal(276_000), Decimal(5600)} <= set(golds)
    for gold in golds:
        for carrier in ("{}", "Antwort: **{}** Euro", "Antwort: {} (= 2 · 9)", "\\boxed{{{}}} = 2 \\cdot 9", "Antwort: 3 · 7 = {}"):
            assert read_answer(carrier.format(f"{gold:,}".replace(",", "."))) == Reading(gold, False)


INTEGERS = st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1)
CARRIERS = st.sampled_from(
    ["{}", "{}.", "Antwort: {}", "Antwort: **{}**\n", "\\boxed{{{}}}", "<answer>{}</answer>", "Das sind {} Euro, ja."]
)


@given(INTEGERS, st.sampled_from([".", "", "'", "\u00a0", "\u202f", "\u2009"]), CARRIERS)
def test_integers_written_the_german_way_come_back(number, separator, carrier):
    written = f"{number:,}".replace(",", separator)
    assert read_answer(carrier.format(written)) == Reading(Decimal(number), False)


@given(st.integers(0, 10**12), st.text("0123456789", min_size=1, max_size=8), CARRIERS)
def test_decimals_written_the_german_way_come_back(whole, decimals, carrier):
    written = f"{whole:,}".replace(",", ".") + f",{decimals}"
    reading = read_answer(carrier.format(written))
    assert reading.value == Decimal(f"{whole}.{decimals}")
    # Only up to 999 could English have meant groups.
    assert reading.ambiguous == (0 < whole < 1000 and len(decimals) == 3)


@given(INTEGERS)
def test_gold_answers_with_english_commas_come_back(number):
    assert read_gold(f"{number:,}") == number


@given(st.text(st.sampled_from("0123456789.,-−– '\u00a0:/^=()*_\\{}antwortANTWORT<>\n€²１ſİ½±√[]≈✓eE"), max_size=60))
def test_any_text_is_read_without_an_error(text):
    reading = read_answer(text)
    assert reading.value is not None or not reading.ambiguous
    if reading.value is not None:
        assert Decimal(write_value(reading.value)) == reading.value


@pytest.mark.parametrize(
    "piece",
    ["1", "1.", "1 ", "111 ", "1,", "-", " -", "- 1", "Antwort:", "Antwort: 1", "<answer>", "\\boxed{", "=", "1=", "**",
     "1\u00a0111", "１", "1１.", "\\text{", "1(", "(1", "1 (", "1 oder ", ", 1", "minus ", "±1", "1 1/2 ", "1e1", "½", "√",
     "1·10^", "\\boxed{1", "<answer>1</answer>", "1 a ", "{1"],
)  # fmt: skip
def test_long_repetitions_are_read(piece):
    """Quadratic work would hang here."""
    text = piece * (100_000 // len(piece))
    read_answer(text)
    assert value(f"{text}1x\nAntwort: 18") == 18


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_values_are_written_in_one_plain_way(number):
    text = write_value(number)
    assert Decimal(text) == number
    assert "E" not in text and text != "-0"
    assert "." not in text or text[-1] not in ".0"
