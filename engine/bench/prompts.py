"""English prompts for the workloads of real text: short questions, and reports to summarise under one instruction.

Each seed picks and orders other pieces, so that repetitions share no more than a service's requests would. Called by
`workloads.build`; knows no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

Message = dict[str, str]

_QUESTIONS = (
    "Explain how {topic} works to {reader}.",
    "What are the three most common mistakes people make with {topic}?",
    "Write a short story in which {topic} saves the day for {reader}.",
    "Give me a plan for one week to learn the basics of {topic}. I am {reader}.",
    "List the advantages and the drawbacks of {topic} in two short paragraphs.",
    "Draft a friendly email to {reader} about {topic}, with a clear question at the end.",
    "How did {topic} change over the last hundred years?",
    "Which five questions should I ask before I spend money on {topic}?",
)
_TOPICS = (
    "a bicycle gear", "sourdough bread", "a rain barrel", "tidal power", "double-entry bookkeeping", "a pinhole camera",
    "beekeeping", "the water cycle", "a lighthouse lamp", "public libraries", "crop rotation", "a mechanical clock",
    "knitting patterns", "railway signals", "a heat pump", "composting", "map projections", "paper recycling",
    "a sailing dinghy", "night trains", "vaccination", "a slide rule", "street markets", "a telescope",
)  # fmt: skip
_READERS = (
    "a curious child of nine", "a new colleague", "someone who never liked mathematics", "my grandmother",
    "a busy shop owner", "a town council", "a student of history", "an engineer from another field",
)  # fmt: skip

_INSTRUCTIONS = (
    "You are an assistant of the operations desk of a regional ferry company. You read reports from ships, harbours "
    "and workshops and turn them into notes for the morning meeting. Write in plain English. Begin with one "
    "sentence that says what happened and whether passengers were affected. Then give at most four points, the most "
    "urgent first, each with the place, the time and the person who has to act, if the report names them. Keep "
    "every number exactly as it is written, and never guess one that is missing: say that it is missing. Do not "
    "repeat greetings, signatures or weather that had no effect. If two statements contradict each other, quote "
    "both and say which is the later one. When a report asks a question, end your note with that question and the "
    "name of the one who asked. Use no headings and no bold text. A note should be understood by somebody who has "
    "not read the report and has thirty seconds. Costs are given in the currency of the report. Distances stay in "
    "nautical miles, speeds in knots, and all times are local times of the harbour that is named. If the report is "
    "about an injury, leave out names of passengers. If it is about crew, use their role and not their name. If "
    "nothing in the report needs anybody to act, say so in one sentence and stop there."
)
_PARAGRAPHS = (
    "The morning service left the north pier at ten past six with two hundred and eleven passengers and forty-three "
    "cars. Half an hour out the chief engineer heard a knocking from the port gearbox and reduced that engine to "
    "half speed. The crossing took eighteen minutes longer than planned. No passenger complained, but the "
    "connecting bus to the hospital had already gone when the ship came in, and two people took a taxi, which the "
    "purser paid from the cash box.",
    "In the workshop the gearbox was opened at eleven. Two teeth of the second wheel are chipped and there is metal "
    "in the oil filter. A replacement wheel lies in the store at the south yard, catalogue number seven hundred "
    "and twelve, but the seal that goes with it is out of stock. The supplier promises one for Thursday. The "
    "foreman thinks that the old seal will hold for a week if the ship stays below eleven knots; the surveyor, who "
    "came at two, does not agree.",
    "The ticket machine at the island landing has refused cards since Saturday evening. The attendant has restarted "
    "it four times and each time it worked for about twenty minutes. People pay in cash or travel on a promise; by "
    "Sunday night there were sixty-four names on the list of those who owe a fare. The company that maintains the "
    "machine was called on Sunday at nine and said that somebody would ring back, which nobody has done so far.",
    "Fog held the late boat at the mainland until ten. Ninety passengers waited in the hall, where the heating was "
    "off because the timer still runs on the summer plan. The café stayed open an hour longer of its own accord and "
    "gave out tea. The harbour master asks whether the company will pay for it. A school class of twenty-six slept "
    "in the gymnasium on the island the night after, since their train had left; the teacher was content with how "
    "they were looked after.",
    "Divers inspected the piles of the old jetty on Wednesday at low water. Of thirty-two piles five have lost more "
    "than a third of their thickness just below the waterline, all of them on the eastern side, where the current "
    "is strongest. They advise to keep lorries over seven tonnes off the jetty until those piles have sleeves. "
    "Sleeves take three weeks to make and two days to fit, and the fitting needs calm weather. The brewery sends a "
    "lorry of nine tonnes each Monday.",
    "A deckhand slipped on the car deck while the ramp was being lowered and hurt his wrist. He was bandaged on "
    "board and seen by a doctor at noon, who found no break and wrote him off until Friday. The deck was wet from a "
    "leaking hydraulic hose that had been reported on the third of the month. The hose has since been replaced. "
    "The mate has asked for a strip of rough paint along the ramp on all three ships and wants to know who decides "
    "about it.",
    "Bookings for the holiday weekend stand at eighty-seven per cent, against seventy-nine at the same time last "
    "year. The Friday afternoon crossings are full. The planners suggest an additional crossing at nine in the "
    "evening, with the smaller ship and a crew of six. It would cost about four thousand and bring in between three "
    "and six thousand. The crew representative agrees if the rest period before the Saturday morning service is "
    "kept at eleven hours.",
    "The new radio relay on the hill was switched on at the beginning of the week. Reception in the western "
    "channel, which used to break off behind the cliffs, is now clear down to the second buoy. Between the second "
    "and the third buoy it still fails now and then. The technician believes that the antenna is turned about ten "
    "degrees too far to the north and offers to correct it on his next visit, which is not before the twentieth.",
    "A flock of geese has settled on the car park of the south terminal. There are about seventy of them. Drivers "
    "stop in the entrance and the queue reached the main road twice, once for a quarter of an hour. The town's "
    "warden says that the birds may not be driven off before the end of the month. He has lent us two wooden "
    "fences, with which the left-hand lane could be kept open if somebody were to stand there at the busy times.",
    "Fuel use per crossing rose by six per cent in the last quarter. Most of it comes from one ship, and there from "
    "the outward crossings alone. The master suspects growth on the hull; the last cleaning was fourteen months "
    "ago, and it is due every twelve. The dock has a place free from the fourth to the seventh. In those days the "
    "spare ship would have to do the service, and she cannot carry vehicles higher than three and a half metres.",
    "The bridge clock of the night boat and the clock in the harbour office were found to differ by four minutes. "
    "The log of the last two months therefore shows departures before the planned time that were in truth punctual. "
    "The office has set its clock by the radio signal. The second officer writes that the times in his reports up "
    "to the ninth should be read as four minutes later; the office writes that they should be left as they are.",
    "Three schools have asked for a guided tour of the engine room in spring. Tours were stopped when the insurance "
    "was renewed, and the form that the insurer now wants has nineteen pages. The purser has filled in the first "
    "twelve and needs the rest from the engineers: the greatest number of people that may stand on the upper "
    "grating, the temperature there at half load, and the name of somebody who is trained to lead them out in the "
    "dark.",
)


def chats(seed: int, count: int) -> Iterator[list[Message]]:
    """`count` conversations of one short question each, all different as far as there are questions."""
    rng = random.Random(f"chat-{seed}")
    topics = rng.sample(_TOPICS, len(_TOPICS))
    for i in range(count):
        question = _QUESTIONS[(seed + i + i // len(topics)) % len(_QUESTIONS)]
        text = question.format(topic=topics[i % len(topics)], reader=rng.choice(_READERS))
        yield [{"role": "user", "content": text}]


def summaries(seed: int, count: int) -> Iterator[list[Message]]:
    """`count` reports under one system prompt, which names the seed's day so that it is another one each time."""
    rng = random.Random(f"summary-{seed}")
    system = f"Notes for day {seed} of the season. {_INSTRUCTIONS}"
    for i in range(count):
        report = "\n\n".join(rng.sample(_PARAGRAPHS, 5))
        text = f"Summarise report {i + 1} of {count} for the morning meeting.\n\n{report}"
        yield [{"role": "system", "content": system}, {"role": "user", "content": text}]
