import sys, subprocess, re, os, dataclasses
from cupy_flash.families import FAMILIES
from cupy_flash.families.hopper_backward import HopperBackwardTile, HopperBackwardFamily
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import GradientSpec
from cupy_flash.problem.problem import make_problem, ArraySpec
from cupy_flash.problem.backward import with_gradient
def prob(d=128,s=4096,causal=False,h=16,hk=None,dtype="bfloat16",grad=None,b=None,wrt=("q","k","v")):
    b=b or max(1,16384//s); hk=hk or h
    q=ArraySpec.contiguous((b,s,h,d),dtype); k=ArraySpec.contiguous((b,s,hk,d),dtype)
    p=make_problem(q,k,k,causal=causal)
    g=ArraySpec.contiguous((b,s,h,d),grad or dtype); gk=ArraySpec.contiguous((b,s,hk,d),grad or dtype)
    return with_gradient(p,GradientSpec(wrt,grad or dtype),q,{n:(g if n=="q" else gk) for n in wrt})
def unit(p,tile=None):
    F=FAMILIES["backward"]["hopper"]; dev=device_for_arch("sm_90")
    why=F.why_not(p,dev)
    assert why is None, why
    tile=tile or F.default_tile(p,dev)
    assert F.why_not_tile(p,dev,tile) is None, F.why_not_tile(p,dev,tile)
    return F.unit(p,tile,F.schedule(p,dev,tile)),tile
def compile(p,name,tile=None,extra=()):
    u,tile=unit(p,tile)
    src=f"/tmp/hopc/{name}.cu"; os.makedirs("/tmp/hopc",exist_ok=True)
    txt="\n".join(l for l in u.text.splitlines() if "__INTADDR__" not in l)
    open(src,"w").write(txt)
    cub=f"/tmp/hopc/{name}.cubin"
    r=subprocess.run(["nice","nvcc","-std=c++17","-arch=sm_90a","-cubin","-ftz=true","--expt-relaxed-constexpr","-Xptxas","-v","-I","kernels_cu",src,"-o",cub,*extra],capture_output=True,text=True)
    print("==",name,tile); print("\n".join(l for l in r.stderr.splitlines() if not re.search("gmem|^$|Function prop|Compiling entry",l))[:6000])
    return cub
if __name__=="__main__":
    for a in sys.argv[1:]:
        kw=dict(x.split("=") for x in a.split(",") if "=" in x)
        t={k:int(v) for k,v in kw.items() if k in ("Br","columns","q_stages","dout_stages")}
        d=int(kw.get("d",128))
        p=prob(d,causal=kw.get("causal")=="1",grad=kw.get("grad"))
        tile=None
        if t:
            base=unit(p)[1]; tile=dataclasses.replace(base,**t)
        compile(p,a.replace("=","_").replace(",","_"),tile)
