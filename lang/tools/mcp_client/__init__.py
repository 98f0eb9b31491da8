"""Tools of MCP servers (Model Context Protocol), through the package `mcp`."""
