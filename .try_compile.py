import sys,time,dataclasses
sys.path.insert(0,'/tmp')
from try1 import prob
from cupy_flash.problem.device import device_for_arch
from cupy_flash.planning.planner import make_plan
from cupy_flash.gpu.compiler import compile_cubin
arch=int(sys.argv[1]); d=int(sys.argv[2]); causal=sys.argv[3]=="1"
tile=dict(kv.split("=") for kv in sys.argv[4:]); tile={k:int(v) for k,v in tile.items()} or None
dev=device_for_arch(arch)
t=time.time(); pl=make_plan(prob("bfloat16",d,causal=causal),dev,family="fused",tile=tile)
try:
    c=compile_cubin(pl.unit,dev)
except Exception as e:
    print(str(e)[:6000]); sys.exit(1)
open(f"/tmp/fused_{arch}_{d}.cubin","wb").write(c.image)
print(arch,d,causal,pl.tile,pl.shared_memory,round(time.time()-t,1),{e:(r.registers,r.spill_bytes) for e,r in c.resources.items()})
