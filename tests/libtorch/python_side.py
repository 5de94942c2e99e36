"""What Python makes of the state that state_test.cpp wrote to FOLDER/start.pt; its answers go to FOLDER/python.pt."""
import sys

import torch
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 3 * 3, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.log_softmax(self.fc(x.flatten(1)), 1)


folder = sys.argv[1]
start = torch.load(folder + "/start.pt")
x, y = start["batch"]["x"], start["batch"]["y"]

net = ConvNet()
net.load_state_dict(start["model"])
with torch.autocast("cpu", torch.bfloat16):
    loss = F.nll_loss(net(x), y)
loss.backward()
answer = {"loss": loss.detach(), "gradients": {name: p.grad.clone() for name, p in net.named_parameters()}}

net.load_state_dict(start["model"])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)


def step():
    optimizer.zero_grad()
    F.nll_loss(net(x), y).backward()
    optimizer.step()


def copied(state):
    return {name: value.clone() for name, value in state.items()}


step()
step()
answer["model"] = copied(net.state_dict())
answer["optimizer"] = {"state": {i: copied(s) for i, s in optimizer.state_dict()["state"].items()},
                       "param_groups": optimizer.state_dict()["param_groups"]}
step()
answer["third"] = copied(dict(net.named_parameters()))
answer["third"] = {name: value.detach() for name, value in answer["third"].items()}
torch.save(answer, folder + "/python.pt")
