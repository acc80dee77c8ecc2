"""The subcommands, one file each; `rankscope.command` finds them."""
