"""The KV connector: the scheduler side decides, the worker side copies."""
