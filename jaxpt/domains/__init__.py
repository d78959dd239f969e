"""Domains: families of tasks, each with its prompts, worked solutions and graders."""
