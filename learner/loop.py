"""The learner's main loop, the same on every rank."""

from learner.flow import Flow


def train(flow: Flow) -> None:
    """Make policy versions until there are `learner.steps` of them.

    Consumes: batch i of the buffer at version i, and makes version i + 1 of it.
    Waits for: that batch; the servers' LOADED of the version before the last.
    Unblocked by: rollout servers that deliver groups, a server that joins (it gets the current version), a
        signal, or `learner.batch_timeout_s`.
    """
    for batch in flow.batches():
        report = flow.update(batch)
        flow.publish()
        if flow.save_due():
            flow.save()
        flow.report(batch, report)
