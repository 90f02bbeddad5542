"""The store at etcd v3: its client, access, leases, watches, and error messages."""
