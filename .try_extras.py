import sys, time, traceback
sys.path.insert(0,'tests')
import numpy as np, cupy
from on_gpu.test_gradients import draw
from support.gradient_rule import check_gradients
from cupy_flash import UnsupportedError
i,n,limit=int(sys.argv[1]),int(sys.argv[2]),float(sys.argv[3])
t=time.time(); done=bad=0; seed=600+i
while time.time()-t<limit and seed<6000:
    call,family=draw(seed); seed+=n
    rest=tuple(x for x in call.names if x not in ("q","k","v"))
    if not rest: continue
    if i%3: call.wrt=rest; family="simt"
    done+=1
    try:
        try: got=call.run(cupy,family=family)
        except UnsupportedError: got=call.run(cupy)
        check_gradients(call,got)
        for _ in range(30 if done%3==0 else 3):
            again=call.run(cupy,family=family if i%3 else None) if i%3 else None
            if again is None: break
            for name,x in got.items():
                if not np.array_equal(x.view(np.uint8),again[name].view(np.uint8)): raise AssertionError("bits differ of "+name)
    except Exception as e:
        bad+=1; tb=traceback.extract_tb(e.__traceback__)[-1]
        print("BAD",seed-n,family,type(e).__name__,str(e)[:300].replace("\n"," "),"@",tb.name,tb.lineno,"|",str(call)[:300],flush=True)
print(i,done,"calls",bad,"bad",flush=True)
