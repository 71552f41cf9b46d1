import numpy as np, cupy, time
from cupy_flash import *
from cupy_flash import flash_attention_backward as B
def go(dt,b,h,s,d):
    q,k,v=(cupy.random.standard_normal((b,s,h,d)).astype(np.float32).astype(dt) for _ in range(3))
    rng=np.random.default_rng(0)
    table=cupy.asarray(rng.standard_normal((h,257)).astype(np.float32)); col=cupy.asarray(rng.standard_normal((h,s)).astype(np.float32)); gain=cupy.ones(h,np.float32); seven=cupy.zeros(7,np.float32); row=cupy.zeros(s,np.float32)
    mods={
     "table":ScoreMod(lambda score,h,i,j,table: score+table[h,np.clip(i-j,-128,128)+128],table=table,differentiable=("table",)),
     "gain":ScoreMod(lambda score,h,gain: score*gain[h],gain=gain,differentiable=("gain",)),
     "col":ScoreMod(lambda score,h,j,col: score+col[h,j],col=col,differentiable=("col",)),
     "j%7":ScoreMod(lambda score,j,seven: score+seven[j%7],seven=seven,differentiable=("seven",)),
     "row":ScoreMod(lambda score,i,row: score*row[i],row=row+1,differentiable=("row",)),
    }
    cases=[("plain",{},("q",))]+[("mod "+n,{"score_mod":m},("score_mod."+m.differentiable[0],)) for n,m in mods.items()]
    for shape in ((b,h,s,s),(1,h,s,s),(1,1,s,s),(b,1,1,s),(1,1,1,s),(1,h,s,1),(1,1,1,1)):
        bias=cupy.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dt); cases.append((f"bias {shape}",{"bias":bias},("bias",)))
    cases.append(("sinks",{"sinks":cupy.zeros(h,np.float32)},("sinks",)))
    for name,m,wrt in cases:
        out,lse=flash_attention(q,k,v,causal=True,return_lse=True,**m)
        f=lambda: B(out,q,k,v,out,lse,causal=True,wrt=wrt,family="simt",**m)
        g=f(); s0=cupy.cuda.Event(); s1=cupy.cuda.Event(); s0.record(); f(); s1.record(); s1.synchronize()
        print(np.dtype(dt).name,b,h,s,d,name,f"{cupy.cuda.get_elapsed_time(s0,s1):.3f} ms",float(cupy.isfinite(g[0]).all()),flush=True)
    st=cupy.cuda.Stream(non_blocking=True)
    m=mods["table"]; bias=cupy.zeros((1,1,1,s),dt); wrt=("bias","sinks","score_mod.table"); kw=dict(causal=True,bias=bias,sinks=cupy.zeros(h,np.float32),score_mod=m)
    out,lse=flash_attention(q,k,v,return_lse=True,**kw)
    with st:
        e=B(out,q,k,v,out,lse,wrt=wrt,**kw)
        st.begin_capture(); g=B(out,q,k,v,out,lse,wrt=wrt,**kw); graph=st.end_capture()
        for x in g: x.fill(7)
        graph.launch(st); st.synchronize()
    print("graph equal",[bool((x==y).all()) for x,y in zip(e,g)])
go(np.float16,2,8,4096,64)
