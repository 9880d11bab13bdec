"""A submission that happens once, by a driver that may be killed at any moment.

It is written down before the master is asked; one whose answer got lost is looked for before another is made.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.errors import Refused
from tools.driver.patience import PATIENCE
from tools.driver.records import Attempt

SETTLING = 20.0  # seconds in which a submission of a driver that was killed may still appear on the master


@dataclass(frozen=True)
class Submission:
    """How one experiment is found again or submitted.

    Args:
        name: what it is, for people.
        address: the master's.
        search: experiments that may be this one.
        submit: makes one; None where the answer got lost.
        save: keeps the attempt as it stands.
    """

    name: str
    address: str
    search: Callable[[], list[int]]
    submit: Callable[[], int | None]
    save: Callable[[], None]
    say: Callable[[str], None]
    progress: Callable[[str], None]
    sleep: Callable[[float], None]
    now: Callable[[], float]

    def experiment(self, attempt: Attempt, known: bool) -> int:
        """Found again or submitted; ``known`` says that an earlier call wrote the attempt down.

        Raises:
            Refused: the master gave no answer for long, or there are several such experiments.
        """
        began = self.now()
        while (number := self._found(attempt, known) or self.submit()) is None:
            if self.now() - began > PATIENCE:
                raise Refused(
                    f"{self.address} answers no submission of stage {self.name}; give the same command again later: it looks "
                    "for the experiment before it submits one"
                )
            self.say(f"{self.name}: the answer to the submission got lost; looking for its experiment")
            attempt.requested, known = self.now(), True
            self.save()
        return number

    def _found(self, attempt: Attempt, known: bool) -> int | None:
        """The experiment of this attempt, if there is one; a submission may still be on its way to the master."""
        while not (found := self.search()):
            if not known or self.now() - attempt.requested > SETTLING:
                return None
            self.progress(f"{self.name}: looking for a submission that was interrupted")
            self.sleep(1.0)
        if len(found) > 1:
            raise Refused(
                f"stage {self.name} has {len(found)} experiments with this plan ({', '.join(map(str, found))}); kill all "
                f"but one, and take the label {attempt.label} from the others"
            )
        self.say(f"{self.name}: found experiment {found[0]} again")
        return found[0]
