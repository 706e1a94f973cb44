"""The 21 office jobs: who asks for what, in which words, over which files, and in which order the work goes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["JOBS", "MARKS", "ROUNDING", "UNITS", "Job", "Slot"]


class Slot(NamedTuple):
    """A piece of information that can be missing: its kind, its eight words and the sentence that says it (``{}`` for the word)."""

    kind: str
    words: tuple[str, ...]
    sentence: str


class Job(NamedTuple):
    """One job. `files`: main files; `goal.kind` scope, group or measure; `constraint.kind` round, exclude, approve or protect.

    `column` names what is totalled (its values are `keys`), `scope` the column that a scope goal filters. `lists`: lists to join, `place`
    where that work stands (early, mid, late), `left` what they are joined to (raw or clean rows), `scan` whether each list is looked at
    and `tally` whether amounts are totalled by the last of them. `clean`: order of the cleaning steps.
    `fixed`: the mark or unit, `rounding` and `keep` the words for what the slots leave open ("" for no such step).
    `notice`: the team hears when work starts; `share`: the report has a column of shares.
    `looks`: what is looked at first; `peeks`: tools whose table is looked at on the way; `ends`: what is looked at last.
    """

    name: str
    opening: str
    goal: Slot
    input: Slot
    constraint: Slot
    context: Slot
    files: tuple[str, ...]
    column: str
    keys: tuple[str, ...]
    lists: tuple[str, ...]
    fixed: str
    clean: tuple[str, ...]
    place: str = "early"
    left: str = "raw"
    scope: str = ""
    rounding: str = "tens"
    keep: str = ""
    notice: bool = False
    share: bool = False
    tally: bool = False
    scan: bool = False
    looks: tuple[str, ...] = ("incoming", "lists", "rules", "head")
    peeks: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def _w(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What one of each is in the smallest unit (pieces, cents, minutes, grams, millilitres); the house's own whole-number rates.
UNITS = {
    "singles": 1, "pairs": 2, "packs": 6, "dozens": 12, "scores": 20, "cases": 24, "grosses": 144, "reams": 500,
    "yen": 1, "rupees": 2, "pesos": 6, "crowns": 15, "dollars": 100, "euros": 108, "francs": 113, "pounds": 127,
    "minutes": 1, "quarters": 15, "halves": 30, "lessons": 45, "hours": 60, "shifts": 480, "days": 1440, "weeks": 10080,
    "grams": 1, "ounces": 28, "kilos": 1000, "stones": 6350, "crates": 12000, "baskets": 15000, "bags": 25000, "sacks": 50000,
    "spoons": 15, "shots": 44, "cups": 240, "pints": 568, "bottles": 750, "litres": 1000, "gallons": 4546, "kegs": 58674,
}
ROUNDING = {"ones": 1, "fives": 5, "tens": 10, "dozens": 12, "twenties": 20, "fifties": 50, "hundreds": 100, "thousands": 1000}
MARKS = _w("void draft test copy hold stale trial spare")

_PIECES, _MONEY, _TIME = _w("singles pairs packs dozens scores cases grosses reams"), tuple(UNITS)[8:16], tuple(UNITS)[16:24]
_WEIGHT, _VOLUME, _ROUND = tuple(UNITS)[24:32], tuple(UNITS)[32:40], tuple(ROUNDING)
_BRANCHES = _w("north south east west coast valley harbour hill")
_MONTHS = _w("january february march april may june july august")
_PEOPLE = _w("anna ben carla david emma felix grace henry")
_FOLDERS = _w("invoices contracts photos letters receipts leases maps minutes")
_GOODS = _w("soap tea rice oil salt flour honey paper candles thread")

JOBS = (
    Job("sales", "We owe the board a sales report.",
        Slot("scope", _BRANCHES, "It is about the {} branch only."),
        Slot("source", _w("archive paper phone audit master till legacy web"), "Take the account owners from the {} list."),
        Slot("round", _ROUND, "Round the totals to full {}."), Slot("mark", MARKS, "Remember that entries marked {} were never real sales."),
        ("jan", "feb"), "product", _GOODS, ("owners",), "packs", _w("dedupe tidy drop convert"),
        scope="branch", ends=_w("history")),
    Job("ledger", "Could you close the ledger for me?",
        Slot("group", _w("region seller channel carrier client team city shift"), "Give the balance per {}."),
        Slot("source", _w("bank cash post clerk audit proxy backup spring"), "The cost centres come from the {} export."),
        Slot("approve", _PEOPLE, "The report has to be approved by {}, who also gets the mail."),
        Slot("unit", _MONEY, "By the way, the amounts in those files are in {}."),
        ("debit", "credit", "fees", "transfers"), "account", (), ("centres", "phones"), "void", _w("dedupe drop tidy convert"),
        place="mid", tally=True, scan=True, looks=_w("incoming rules head count"), ends=_w("outbox")),
    Job("inventory", "The stock count is in, please make the summary.",
        Slot("scope", _w("cellar attic garage yard dock shop kitchen office"), "We need it for the {} store."),
        Slot("source", _w("barcode manual supplier spring autumn pilot backup mobile"), "Use the shelf labels of the {} scan."),
        Slot("protect", _FOLDERS, "When you clear out the old folder, the {} have to stay."),
        Slot("unit", _PIECES, "The counters wrote their numbers in {}."),
        ("count",), "item", _w("bolt nut screw nail hinge lock chain hook spring wheel"),
        ("labels", "aisles"), "stale", _w("tidy dedupe drop convert"),
        scope="store", place="late", share=True, looks=_w("incoming lists rules head count old"), peeks=_w("rank"), ends=_w("history")),
    Job("roster", "The duty roster needs its monthly totals.",
        Slot("scope", _w("day night early late spare swing split relief"), "I only want the {} shift."),
        Slot("source", _w("union payroll badge gate phone paper draft master"), "Names go by the {} register."),
        Slot("exclude", _w("anna ben carla david emma felix grace henry"), "Leave {} out of the final table."),
        Slot("unit", _TIME, "Durations were entered in {}."),
        ("weeka", "weekb", "weekc", "weekd"), "person", (*_PEOPLE, "iris", "jonas"), ("names", "phones"), "test", _w("dedupe convert tidy drop"),
        scope="shift", notice=True, tally=True, looks=_w("incoming lists rules head tables"), peeks=_w("stack")),
    Job("harvest", "Time for the harvest overview.",
        Slot("scope", _w("apple pear plum cherry grape olive hazel quince"), "This year they asked for the {} fields."),
        Slot("source", _w("survey drone hand farmer county spring autumn legacy"), "Field owners are in the {} map list."),
        Slot("round", _ROUND, "Totals must be rounded to {}."),
        Slot("unit", _WEIGHT, "The pickers weigh in {}."),
        ("first", "second"), "field", _w("ash birch cedar elm fir larch maple oak pine yew"), ("owners", "wardens"), "hold",
        _w("dedupe tidy drop convert"), scope="crop", place="mid", left="clean", scan=True,
        looks=_w("incoming lists head count"), peeks=_w("convert join")),
    Job("library", "Please prepare the lending figures for the library meeting.",
        Slot("measure", _w("loans returns renewals fines visits requests losses repairs"), "They want to talk about {}."),
        Slot("source", _w("desk online school mobile summer winter central annex"), "Reader groups are in the {} card file."),
        Slot("approve", _PEOPLE, "Have {} sign it off and mail it there."),
        Slot("mark", MARKS, "Lines marked {} are left over from the system change and mean nothing."),
        ("ground", "upper"), "subject", _w("art law music history poetry travel cooking physics chess drama"), ("groups",), "pairs",
        _w("drop dedupe tidy convert"), place="late", share=True, tally=True, scan=True, looks=_w("incoming lists rules tables history")),
    Job("clinic", "The clinic's quarterly statistics are due.",
        Slot("measure", _w("visits calls scans tests beds meals doses births"), "The ministry wants the number of {}."),
        Slot("source", _w("ward reception lab insurer county pilot nurse legacy"), "Take room numbers from the {} index."),
        Slot("protect", _FOLDERS, "Empty the old folder but keep the {}."),
        Slot("mark", MARKS, "Rows marked {} came from the training system."),
        ("spring", "summer", "autumn", "winter"), "ward", _w("red blue green amber white violet silver coral indigo ochre"),
        ("rooms", "doctors", "nurses"), "scores",
        _w("dedupe tidy convert drop"), notice=True, rounding="fives", scan=True, tally=True,
        looks=_w("incoming rules head"), ends=_w("outbox history")),
    Job("travel", "I need the travel expenses put together.",
        Slot("group", _w("country project airline hotel purpose grade office client"), "Break them down by {}."),
        Slot("source", _w("agency bank visa diary portal manual audit legacy"), "Budget codes stand in the {} sheet."),
        Slot("round", _ROUND, "Show sums in full {}."),
        Slot("unit", _MONEY, "All bills were booked in {}."),
        ("flights", "hotels", "trains"), "trip", (), ("budgets", "offices", "phones"), "draft", _w("tidy drop dedupe convert"),
        share=True, place="mid", looks=_w("incoming lists rules head"), peeks=_w("total"), ends=_w("outbox")),
    Job("bakery", "Can you do the bakery's order summary?",
        Slot("scope", _w("monday tuesday wednesday thursday friday saturday sunday holiday"), "It should cover the {} orders."),
        Slot("source", _w("van shop phone web market school hotel cafe"), "Drivers are on the {} rota."),
        Slot("exclude", _w("rye spelt oat wheat corn barley millet malt"), "Keep {} out of what we publish."),
        Slot("mark", MARKS, "The ones marked {} were cancelled."),
        ("orders",), "bread", _w("rye spelt oat wheat corn barley millet malt sesame raisin"), ("drivers",), "dozens",
        _w("dedupe tidy drop convert"), scope="weekday", place="late", left="clean", tally=True, keep="receipts",
        looks=_w("incoming lists rules head count history")),
    Job("energy", "Facilities asked for the energy figures.",
        Slot("measure", _w("power heating cooling water gas steam lighting waste"), "It is all about {} this time."),
        Slot("source", _w("meter bill sensor portal tenant survey audit backup"), "Tenants are listed in the {} table."),
        Slot("round", _ROUND, "Published values are rounded to {}."),
        Slot("mark", MARKS, "Readings marked {} are known to be wrong."),
        ("east", "west", "north", "south"), "building", _w("tower annex barn chapel depot forge gallery hall inn lodge"),
        ("tenants", "floors", "meters", "alarms"), "cases",
        _w("dedupe drop convert tidy"), keep="maps", scan=True, tally=True, looks=_w("incoming rules head tables"), peeks=_w("dedupe join")),
    Job("payroll", "Payroll needs its control sheet.",
        Slot("group", _w("grade site union contract manager bank country cohort"), "Sum it up by {}."),
        Slot("source", _w("tax pension badge audit legacy master archive census"), "Staff numbers come from the {} file."),
        Slot("protect", _FOLDERS, "Clean out the old folder, only the {} must not be lost."),
        Slot("unit", _MONEY, "Wages were keyed in {}."),
        ("salaried", "hourly"), "grade", (), ("numbers",), "trial", _w("dedupe tidy drop convert"),
        place="late", notice=True, rounding="dozens", looks=_w("incoming lists rules head old"), peeks=_w("drop"), ends=_w("history")),
    Job("charity", "Our donors expect the annual letter with figures.",
        Slot("scope", _w("schools wells clinics forests animals music sports housing"), "This letter is for the {} fund."),
        Slot("source", _w("gala web church street radio bank club youth"), "Addresses of the sponsors are in the {} book."),
        Slot("approve", _PEOPLE, "It goes out under the name of {}, so sign and send it there."),
        Slot("unit", _MONEY, "The gifts were recorded in {}."),
        ("gifts",), "town", _w("alder brook croft dale eden ford grove heath isle kirk"), ("sponsors",), "copy", _w("dedupe tidy drop convert"),
        scope="fund", place="mid", tally=True, looks=_w("incoming lists rules head count"), ends=_w("outbox")),
    Job("brewery", "The excise office wants our brewing record.",
        Slot("scope", _w("lager stout porter bitter pilsner amber saison bock"), "They only tax the {} line at the moment."),
        Slot("source", _w("tank silo cellar truck lab press gate spring"), "Batch keepers are in the {} log."),
        Slot("round", _ROUND, "The form takes values rounded to {}."),
        Slot("unit", _VOLUME, "Volumes in the log are given in {}."),
        ("north", "south", "central"), "tank", _w("atlas bruno castor diana echo flora gaia hera iris juno"), ("keepers", "valves"), "spare",
        _w("tidy dedupe convert drop"), scope="line", notice=True, keep="contracts", tally=True, looks=_w("incoming lists rules")),
    Job("museum", "Could you get the visitor report ready?",
        Slot("measure", _w("adults children students seniors members guides tours parties"), "Only {} matter for the grant."),
        Slot("source", _w("ticket door card web school coach hotel press"), "Wing managers are in the {} directory."),
        Slot("exclude", _w("egypt greece rome china japan india peru persia"), "The {} rooms were closed, leave them out."),
        Slot("mark", MARKS, "Whatever is marked {} was a rehearsal."),
        ("may", "june", "july"), "room", _w("egypt greece rome china japan india peru persia crete malta"),
        ("managers", "alarms", "guards"), "packs", _w("dedupe tidy drop convert"), place="mid", scan=True,
        looks=_w("incoming lists head count"), peeks=_w("rank")),
    Job("shipping", "Customs is waiting for the shipping statement.",
        Slot("group", _w("port vessel carrier tariff country broker berth season"), "They sort everything by {}."),
        Slot("source", _w("manifest invoice pilot scan radio paper tally crane"), "Consignees are on the {} sheet."),
        Slot("approve", _PEOPLE, "Nothing leaves without the signature of {}, send it there too."),
        Slot("unit", _WEIGHT, "The weights are in {}."),
        ("inbound", "outbound", "transit", "returns"), "port", (), ("consignees", "trucks", "docks"), "hold", _w("dedupe convert drop tidy"),
        keep="contracts", share=True, tally=True, looks=_w("incoming lists rules head"), ends=_w("outbox history")),
    Job("survey", "Marketing would like the survey tables.",
        Slot("group", _w("age income gender region device language channel education"), "Split the answers by {}."),
        Slot("source", _w("panel street web phone mail kiosk app pilot"), "Interviewers come from the {} plan."),
        Slot("protect", _FOLDERS, "The old folder can go, except for the {}."),
        Slot("mark", MARKS, "Answers marked {} come from our own staff."),
        ("wave", "repeat"), "age", (), ("interviewers", "hours", "streets"), "pairs", _w("dedupe tidy drop convert"),
        place="late", tally=True, rounding="twenties", looks=_w("incoming rules head count tables history")),
    Job("fleet", "I have to report on the vehicle fleet.",
        Slot("measure", _w("fuel tyres repairs tolls parking fines washing leases"), "Management asks about {}."),
        Slot("source", _w("garage police dealer lease card depot night legacy"), "Car keys are handed out by the {} book."),
        Slot("approve", _PEOPLE, "Get it signed by {} and mail it to the same person."),
        Slot("unit", _MONEY, "The costs were typed in as {}."),
        ("vans", "trucks", "cars"), "plate", _w("otter heron raven badger falcon lynx marten stoat weasel adder"), ("drivers",), "draft",
        _w("drop tidy dedupe convert"), place="mid", notice=True, looks=_w("incoming lists rules head count"), peeks=_w("convert"),
        ends=_w("outbox")),
    Job("school", "The school board wants to see the course figures.",
        Slot("scope", _w("first second third fourth fifth sixth evening summer"), "Restrict it to the {} form."),
        Slot("source", _w("parent teacher office club exam sport clinic dance"), "Tutors are named in the {} list."),
        Slot("exclude", _w("latin biology algebra drama music chess art choir"), "Do not show {} in the result."),
        Slot("unit", _TIME, "Teaching time is noted in {}."),
        ("autumn", "spring", "summer"), "course", _w("latin biology algebra drama music chess art choir crafts debate"), ("tutors", "rooms"), "stale",
        _w("dedupe tidy drop convert"), scope="form", left="clean", place="mid", keep="receipts", looks=_w("incoming lists rules")),
    Job("garden", "Please sum up the garden centre's deliveries.",
        Slot("scope", _MONTHS, "I need the month of {}."),
        Slot("source", _w("nursery market truck phone web school club estate"), "Growers can be found in the {} register."),
        Slot("round", _ROUND, "We print numbers in round {}."),
        Slot("mark", MARKS, "The deliveries marked {} went back the same day."),
        ("plants", "seeds"), "plant", _w("aster daisy iris lily lupin peony poppy rose tulip violet"), ("growers", "depots"), "grosses",
        _w("tidy drop dedupe convert"), scope="month", place="late", share=True, tally=True, looks=_w("incoming lists rules head"),
        peeks=_w("total")),
    Job("printing", "The print shop bill has to be checked.",
        Slot("measure", _w("black colour posters cards books covers labels flyers"), "We were asked about {} only."),
        Slot("source", _w("copier studio press night campus legal stock mail"), "Departments are keyed in the {} list."),
        Slot("protect", _FOLDERS, "Throw away the old stuff but not the {}."),
        Slot("unit", _PIECES, "The shop counts in {}."),
        ("main", "branch", "night"), "unit", _w("admin biology chemistry drama english french german history italian japanese"),
        ("departments", "floors"), "test",
        _w("dedupe tidy drop convert"), place="mid", left="clean", rounding="fifties", looks=_w("incoming lists rules head history")),
    Job("hotel", "Let us get the hotel's season report done.",
        Slot("scope", _w("spring summer autumn winter easter christmas carnival regatta"), "The owners care about the {} season."),
        Slot("source", _w("desk agent web phone porter club police tax"), "Who cleans which room is in the {} plan."),
        Slot("exclude", _w("suite single double twin attic garden tower terrace"), "The {} rooms must not appear in the report."),
        Slot("mark", MARKS, "Bookings marked {} never arrived."),
        ("nights", "extras", "meals"), "kind", _w("suite single double twin attic garden tower terrace cellar loft"), ("cleaners",), "pairs",
        _w("dedupe drop tidy convert"), scope="season", notice=True, share=True, tally=True, looks=_w("incoming lists rules head count"),
        peeks=_w("drop"), ends=_w("history")),
)
