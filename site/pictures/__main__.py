"""`python -m pictures` draws every picture into docs/images/; with a trace.json of a run it first takes step.json from
that: `python -m pictures runs/step/profile/trace.json`."""

import json
import sys
from pathlib import Path

from pictures import PICTURES
from pictures.times import STEP, shown_of

IMAGES = Path(__file__).parents[2] / "docs" / "images"

for trace in sys.argv[1:]:
    shown = shown_of(json.loads(Path(trace).read_text(encoding="utf-8")))
    STEP.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
IMAGES.mkdir(exist_ok=True)
for name, draw in PICTURES.items():
    (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")
    print(IMAGES / f"{name}.svg")
