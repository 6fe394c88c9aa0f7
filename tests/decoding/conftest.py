import pytest
import torch

from sparkdraft.config import DraftConfig
from sparkdraft.drafts.eagle3 import Eagle3Config, Eagle3Draft


@pytest.fixture(scope="session")
def warm_draft(target, tmp_path_factory):
    """An untrained draft of the real target, warm-started and slightly disturbed, as a draft directory."""
    draft = Eagle3Draft(Eagle3Config.of(DraftConfig(), target, [2, 15, 27], 4096))
    draft.set_vocabulary(torch.arange(0, 4096))
    draft.initialise(target, torch.Generator().manual_seed(0))
    directory = tmp_path_factory.mktemp("draft")
    draft.save(directory, torch.float32)
    return directory
