"""``elastirun report``: what happened in a job, from the events of all its nodes, in one page of HTML. See docs/report.md."""
