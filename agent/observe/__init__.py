"""Records of this node for programs: events, the account of its time, traces, the progress of its workers."""
