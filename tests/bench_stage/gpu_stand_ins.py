"""What the GPU check is tested with where there is no GPU: the op's definition for kernels, clocks for timers."""

from toolchain.ops.attention import attend_in_place


def definition(*arguments, scales=None, norms=None, **_):
    """The op's own definition in the place of the kernels."""
    return attend_in_place(*arguments, scales=scales, norms_D=norms)


def wrong_value(*arguments, **options):
    out = definition(*arguments, **options)
    out[0, -1, 3] += 0.02
    return out


class FakeTimer:
    """Every launch takes as long as the test says; the body runs once."""

    def __init__(self, seconds=(1.0,)):
        self.seconds = list(seconds)

    def capture(self, body):
        body()
        return body

    def sample(self, launch):
        return [self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]] * 3


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now
