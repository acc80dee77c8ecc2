"""Run `python -m …` with the CPU time of its main thread profiled: _fleet_profile.py FILE -m MODULE [ARGUMENT …]."""

import cProfile
import runpy
import sys
import time

if __name__ == "__main__":
    profile = cProfile.Profile(timer=time.thread_time)
    path, _, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    try:
        profile.runcall(runpy.run_module, module, run_name="__main__", alter_sys=True)
    finally:
        profile.dump_stats(path)
