"""The agent without components started: settings that change."""

from pathlib import Path

from nodeagent import app, configfile


def test_apply_keeps_settings_that_need_a_restart(agent: app.Agent) -> None:
    old = agent.state.settings
    assert old.cache is not None
    new = old.model_copy(
        update={
            "admin": old.admin.model_copy(update={"listen": "127.0.0.1:2"}),
            "state_dir": Path("/elsewhere"),
            "cache": old.cache.model_copy(update={"budget": 2**30}),
        }
    )
    agent._apply(new)
    assert agent.state.settings.cache is not None
    assert agent.state.settings.cache.budget == 2**30
    assert agent.state.settings.admin == old.admin
    assert agent.state.settings.state_dir == old.state_dir
    assert sorted(agent.state.refused) == ["admin", "state_dir"]
    agent._apply(old)
    assert agent.state.refused == []


def test_apply_refuses_a_new_or_lost_section(agent: app.Agent) -> None:
    agent._apply(configfile.parse("", "x"))
    assert "cache" in agent.state.refused
    assert agent.state.settings.cache is not None
