from sits_trt.runtime.stats import Histogram


def test_values_are_counted_in_buckets_that_include_their_bound() -> None:
    histogram = Histogram((1.0, 10.0))
    for value in (0.0, 1.0, 1.5, 10.0, 10.1, 500.0):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert (snapshot.counts, snapshot.count, snapshot.sum) == ((2, 2, 2), 6, 522.6)
    histogram.observe(1.0)
    assert snapshot.count == 6, "a snapshot stays as it was taken"
