"""The command line: roundpipe train."""
