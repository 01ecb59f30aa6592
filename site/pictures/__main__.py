"""`python -m pictures` draws every picture into docs/images/. Given a run's trace and the number of a step in it, it
takes step.json from there before: `python -m pictures runs/step/profile/trace.json 14`."""

import json
import sys
from pathlib import Path

from pictures import PICTURES
from pictures.times import STEP, shown_of

IMAGES = Path(__file__).parents[2] / "docs" / "images"

if sys.argv[1:]:
    trace, number = sys.argv[1:]
    shown = shown_of(json.loads(Path(trace).read_text(encoding="utf-8")), int(number))
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in shown.items())
    STEP.write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")
IMAGES.mkdir(exist_ok=True)
for name, draw in PICTURES.items():
    (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")
    print(IMAGES / f"{name}.svg")
