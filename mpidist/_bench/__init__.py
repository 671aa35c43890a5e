"""The benchmark behind `mpidist bench`: raw mpi4py and mpidist in the same run."""

from __future__ import annotations

from mpidist._bench._contest import Contestant as Contestant
from mpidist._bench._contest import Effort as Effort
from mpidist._bench._contest import Timing as Timing
from mpidist._bench._contest import measure as measure
from mpidist._bench._job import Job as Job
from mpidist._bench._job import UsageError as UsageError
from mpidist._bench._job import WrongResultError as WrongResultError
from mpidist._bench._machine import is_crowded as is_crowded
from mpidist._bench._machine import machine_facts as machine_facts
from mpidist._bench._machine import software_facts as software_facts
from mpidist._bench._machine import transport_facts as transport_facts
from mpidist._bench._model import Parameters as Parameters
from mpidist._bench._model import Prediction as Prediction
from mpidist._bench._model import fit as fit
from mpidist._bench._model import model_json as model_json
from mpidist._bench._model import model_text as model_text
from mpidist._bench._model import predict as predict
from mpidist._bench._picture import draw as draw
from mpidist._bench._picture import draw_model as draw_model
from mpidist._bench._picture import missing_matplotlib as missing_matplotlib
from mpidist._bench._results import Record as Record
from mpidist._bench._results import Result as Result
from mpidist._bench._results import read_record as read_record
from mpidist._bench._run import BENCHES as BENCHES
from mpidist._bench._run import run as run
from mpidist._bench._session import Options as Options
from mpidist._bench._shapes import MODELS as MODELS
from mpidist._bench._tables import align as align
from mpidist._bench._tables import header_of as header_of
from mpidist._bench._tables import markdown_of as markdown_of
from mpidist._bench._tables import text_of as text_of
from mpidist._bench._units import parse_seconds as parse_seconds
from mpidist._bench._units import parse_seconds_per_byte as parse_seconds_per_byte
from mpidist._bench._units import parse_size as parse_size
from mpidist._bench._units import show_seconds as show_seconds
from mpidist._bench._units import show_size as show_size
