"""The pages of docs/reference, and tables of other pages, written from the code.

``python -m kvrecall_lab.reference`` writes all that ``pages.PAGES`` names; ``scripts/docs`` does so
before it builds the site.
"""
