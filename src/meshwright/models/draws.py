import torch, hashlib
def _g(seed,site,i):
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{site}/{i}".encode()).digest()[:8],"little")>>1)
def draw_timesteps(seed,samples,n): return torch.stack([torch.randint(n,(),generator=_g(seed,"t",i)) for i in samples])
def draw_noise(seed,samples,shape,dtype): return torch.stack([torch.randn(tuple(shape),generator=_g(seed,"n",i)) for i in samples]).to(dtype)
def draw_drops(seed,samples,rate): return torch.stack([torch.rand((),generator=_g(seed,"d",i))<rate for i in samples])
