from tests.one_thread import one_thread
from tests.same.journeys import Reference, Tracer, in_the_way, tables, travel

__all__ = ["one_thread"]


def test_the_reference_engine_stores_loads_and_misses() -> None:
    tracer = Tracer()
    engine = Reference()
    try:
        journeys = travel(engine, tracer, runs=1)
    finally:
        engine.close()
        tracer.close()
    assert all(in_the_way(runs) for runs in journeys.values())
    (store,), (load,) = list(journeys.values())[:2]
    assert set(Reference.STORE) <= set(store.calls)
    assert set(Reference.LOAD) <= set(load.calls)
    assert store.threads
    modules = {function.module for calls in store.calls.values() for function in calls}
    assert {name.partition(".")[0] for name in modules} == {"kvoffload", "kvoffload_reference"}
    assert not any(name.startswith("kvoffload.engine") for name in modules)
    assert "| miss |" in tables("Reference engine", journeys)
