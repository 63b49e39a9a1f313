import torch, math
from dataclasses import dataclass
@dataclass(frozen=True)
class Diffusion:
    num_timesteps:int; schedule:object; prediction:object
    def ab(self,t):
        f=torch.cos((t.double()+1)/self.num_timesteps*math.pi/2*0.998)
        return f,(1-f*f).sqrt()
    def _v(self,a,x): return a.to(x.dtype).to(x.device).view(-1,*[1]*(x.dim()-1))
    def add_noise(self,x,n,t):
        a,s=self.ab(t); return self._v(a,x)*x+self._v(s,x)*n
    def target(self,x,n,t): return n.clone()
    def ddim_timesteps(self,n): return [int(round(i)) for i in torch.linspace(self.num_timesteps-1,0,n).tolist()]
    def ddim_step(self,pred,x,t,f,clamp=True):
        a,s=self.ab(torch.tensor([t])); a,s=float(a),float(s)
        x0=((x-s*pred)/a).clamp(-1,1)
        if f is None: return x0
        e=(x-a*x0)/s
        b,r=self.ab(torch.tensor([f])); return float(b)*x0+float(r)*e
def guided(c,u,s): return u+s*(c-u)
