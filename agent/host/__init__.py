"""This machine: addresses, ports, CPUs, NUMA nodes, memory, descriptors."""
