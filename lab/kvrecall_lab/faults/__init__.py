"""Every fault, on one clock: the pool on a simulated machine, whose power, disk, store, clock and
memory fail. ``machine`` has the clock and the threads, ``medium`` the disk, ``sqlite`` puts the
index on it, ``store`` is a store beyond the host; ``schedule`` is what happens in one run."""
