"""Histories that have violated an invariant, each by its name, in the smallest form that did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.scenario import Scenario
from tests.simulation.simulate import simulate, virtual_engine


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with virtual_engine():
        yield


HISTORIES = {
    "a connection that is made anew in the launch reports its ranks before it counts as answering": (
        '{"seed":281110979,"kind":"local","nodes":5,"local":false,"iterations":15,"every":0,"recovery":3,"faults":'
        '[["reset",2.86,4,45.0],["abort",10.65,0,400.0]]}'
    ),
    "a rank whose keeper the fence has killed is not the first failure": (
        '{"seed":478016736,"kind":"shared","nodes":4,"iterations":24,"period_s":3.0,"min_nodes":1,"faults":'
        '[["keeper_stopped",3.42,1,110.0],["keeper_killed",62.41,2,45.0]]}'
    ),
    "a failed rank whose node's disk stalls is named, and not one that has lost it": (
        '{"seed":198984410,"kind":"torch","nodes":3,"local":false,"iterations":15,"period_s":1.0,"min_nodes":1,'
        '"recovery":3,"faults":[["disk_stalled",1.43,1,110.0],["rank_exits_0",16.52,1,45.0]]}'
    ),
    "an elastic job has succeeded with rank 0, whatever the others do then": (
        '{"seed":646653421,"kind":"elastic","nodes":6,"iterations":15,"min_nodes":5,"recovery":2,"faults":'
        '[["rank_exits_0",3.32,0,110.0]]}'
    ),
    "who can be lost is settled when the attempt is to end": (
        '{"seed":414463873,"kind":"local","nodes":5,"local":false,"iterations":15,"every":3,"min_nodes":4,"recovery":1,'
        '"faults":[["diverged",4.72,1,45.0],["node_sleeps",5.76,2,7.0]]}'
    ),
    "steps that come while an attempt is ended make no rank dispensable": (
        '{"seed":862170959,"kind":"local","nodes":4,"local":false,"iterations":24,"period_s":1.0,"faults":'
        '[["rank_killed",5.06,2,70.0]]}'
    ),
    "a command's last rank hangs, and those that have done their work are not blamed": (
        '{"seed":195081560,"kind":"command","nodes":4,"iterations":24,"period_s":3.0,"every":0,"min_nodes":2,'
        '"recovery":3,"faults":[["keeper_stopped",3.98,0,400.0]]}'
    ),
    "a silence at which the supervisor could not look was one": (
        '{"seed":442617278,"kind":"sharded","local":false,"period_s":3.0,"every":10,"recovery":3,"faults":'
        '[["agent_stopped",5.34,0,30.0]]}'
    ),
    "of more lost nodes than an elastic job can spare one is named": (
        '{"kind":"elastic","nodes":3,"iterations":5,"period_s":1.0,"every":10,"min_nodes":2,"faults":'
        '[["outage",7.41,0,12.0]]}'
    ),
    "a lost node that comes back to ended peers is named as lost": (
        '{"seed":916559372,"kind":"command","local":false,"iterations":7,"every":3,"recovery":6,"faults":'
        '[["node_sleeps",5.72,4,30.0]]}'
    ),
    "a hang names nobody who was ended before it could leave": (
        '{"seed":129041444,"kind":"direct","iterations":24,"period_s":1.0,"every":10,"min_nodes":2,"recovery":2,"faults":'
        '[["head_disk_stalled",2.86,1,180.0],["rank_deaf",25.41,0,0.4]]}'
    ),
    "nothing is found of an attempt whose failure was recorded and ends the run": (
        '{"kind":"torch","nodes":3,"iterations":8,"every":0,"recovery":6,"faults":[["unfit",0.0,1,0.0],'
        '["slow",3.27,2,400.0],["keeper_killed",9.34,0,45.0],["head_killed_at_effect",33,0,30.0]]}'
    ),
    "a hang names nobody who was ended while a node that woke up left by itself": (
        '{"seed":140969064,"kind":"sharded","local":false,"iterations":8,"period_s":3.0,"every":3,"recovery":7,'
        '"faults":[["node_sleeps",24.28,0,18.0]]}'
    ),
    "an abort that comes together with the plan of an attempt ends the run": (
        '{"seed":222924566,"kind":"sharded","iterations":6,"every":0,"faults":[["disk_stalled",1.72,0,45.0],'
        '["abort_now",1.93,0,18.0]]}'
    ),
    "a request for an abort of a life that has ended does not end the next one": (
        '{"seed":602237701,"kind":"local","nodes":4,"local":false,"iterations":24,"every":3,"min_nodes":2,"recovery":7,'
        '"faults":[["abort",0.35,2,110.0],["abort",0.5,1,12.0],["resume",126.42,1,2.0]]}'
    ),
    "a rank that was never seen to start is named where all others have lost it": (
        '{"kind":"direct","local":false,"iterations":7,"period_s":0.2,"every":3,"faults":[["disk_full",3.2,0,2.0],'
        '["power",4.64,0,2.0]]}'
    ),
    "a rank that lingers after its work has done it, also when the fence kills it and its keeper": (
        '{"kind":"torch","iterations":6,"period_s":0.2,"faults":[["rank_lingers",4.34,0,7.0],'
        '["keeper_stopped",5.99,0,70.0],["abort",12.06,1,45.0]]}'
    ),
    "why an attempt is ended is known to the supervisor that adopts it then": (
        '{"seed":39741200,"kind":"direct","local":false,"iterations":7,"period_s":0.2,"every":3,"faults":'
        '[["disk_full",1.76,1,110.0],["head_killed_at_effect",23,1,12.0]]}'
    ),
    "a node that is not connected again after a sleep of the head is not what the attempt was ended for": (
        '{"seed":948112113,"kind":"torch","nodes":8,"iterations":8,"period_s":1.0,"recovery":5,"faults":'
        '[["disk_stalled",6.13,1,180.0],["isolated",7.05,7,18.0],["head_stopped",35.43,2,30.0]]}'
    ),
    "who can be lost is asked when an attempt is to end, and not of the steps that come afterwards": (
        '{"kind":"local","iterations":6,"period_s":3.0,"every":10,"faults":[["out_of_memory",5.45,1,2.0],'
        '["agent_stopped",5.45,0,180.0]]}'
    ),
    "a lost rank that was killed when its node woke up is named as lost with it": (
        '{"seed":420851839,"kind":"local","nodes":7,"local":false,"iterations":15,"period_s":3.0,"every":0,"recovery":5,'
        '"faults":[["head_stopped",4.12,3,2.0],["node_sleeps",5.88,0,180.0],["slow",33.93,4,18.0]]}'
    ),
    "a lost rank that was killed when its node woke up is named beside another node that came back before": (
        '{"seed":131338314,"kind":"local","nodes":3,"local":false,"iterations":8,"every":10,"recovery":7,"faults":'
        '[["agent_killed",3.24,0,30.0],["node_sleeps",6.71,0,400.0],["cut_from",9.76,1,70.0]]}'
    ),
    "a command whose ranks are on their way out after a stall is not idle": (
        '{"seed":175447686,"kind":"command","nodes":3,"local":false,"iterations":7,"period_s":0.2,"every":3,"recovery":3,'
        '"faults":[["disk_stalled",3.1,0,118.0]]}'
    ),
    "a rank that was lost may wake up in the moment in which its elastic job is ended for that": (
        '{"seed":236819734,"kind":"elastic","iterations":15,"period_s":3.0,"faults":[["node_sleeps",26.98,1,70.0]]}'
    ),
    "that a rank has completed counts for an adopter once its node has answered, which may have its exit record": (
        '{"seed":574894521,"kind":"direct","nodes":3,"local":false,"iterations":8,"faults":[["rank_lingers",6.83,2,12.0],'
        '["rank_killed",10.6,2,0.0],["head_killed_at_effect",35,2,180.0]]}'
    ),
    "what came before a sleep of the head was seen before it": (
        '{"seed":1051873672,"kind":"sharded","local":false,"iterations":40,"period_s":1.0,"every":0,"recovery":5,'
        '"faults":[["head_sleeps",30.79,0,180.0]]}'
    ),
    "a command that hung is not said to hang where it was slow to leave, when that was over": (
        '{"seed":196297594,"kind":"command","nodes":3,"iterations":8,"period_s":1.0,"every":3,"recovery":4,'
        '"faults":[["head_disk_stalled",14.56,0,110.0]]}'
    ),
    "a rank whose node and keeper are both stopped past its lease counts as lost": (
        '{"kind":"elastic","iterations":40,"period_s":1.0,"recovery":7,"faults":[["keeper_stopped",3.83,1,88.0],'
        '["agent_stopped",4.35,1,92.0]]}'
    ),
    "a rank of mlx.launch that was never seen to start is named where the other has lost it": (
        '{"seed":492322403,"iterations":5,"period_s":1.0,"every":3,"faults":[["disk_full",2.35,1,0.0],'
        '["power",3.4,1,2.0]]}'
    ),
    "a lingering rank whose record is missing has done its work, as is seen when the other comes back": (
        '{"iterations":10,"every":3,"recovery":1,"faults":[["keeper_stopped",5.54,0,400.0],["rank_lingers",5.67,0,0.4],'
        '["agent_stopped",11.42,3,400.0]]}'
    ),
    "why an attempt is ended is known to an adopter that sees the ends of its ranks only then": (
        '{"seed":257220302,"kind":"direct","nodes":3,"local":false,"iterations":8,"every":0,"faults":'
        '[["disk_full",3.93,0,110.0],["head_killed_at_effect",21,2,30.0]]}'
    ),
    "a lost rank is named as lost by an adopter, too": (
        '{"seed":231706483,"kind":"elastic","local":false,"iterations":5,"period_s":3.0,"every":3,"min_nodes":1,'
        '"recovery":6,"faults":[["node_sleeps",16.92,0,45.0],["rank_exits_0",21.25,1,12.0],'
        '["head_killed_at_effect",23,0,0.4]]}'
    ),
    "steps that come after a sleep of the head are not older than its end": (
        '{"iterations":40,"period_s":1.0,"every":0,"recovery":5,"faults":[["head_stopped",41.19,2,30.0]]}'
    ),
    "a rank that ended while the head's disk stalled and an attempt hung is judged as the supervisor has seen it": (
        '{"kind":"direct","iterations":15,"period_s":3.0,"every":3,"recovery":6,"faults":[["head_disk_stalled",29.03,1,70.0],'
        '["keeper_killed",48.55,3,70.0]]}'
    ),
    "a lost rank stays lost for the third supervisor, when the second has recorded how it ended": (
        '{"seed":235926335,"kind":"sharded","local":false,"iterations":5,"period_s":0.2,"faults":'
        '[["node_sleeps",3.24,1,110.0],["head_killed_at_effect",32,0,110.0],["head_killed_at_effect",50,0,45.0]]}'
    ),
    "a lost node may wake up in the moment in which the next attempt starts without it": (
        '{"nodes":3,"local":false,"iterations":8,"period_s":3.0,"min_nodes":2,"recovery":5,'
        '"faults":[["node_sleeps",11.05,0,70.0]]}'
    ),
    "that the supervisor was held up by its disk is no hang of a rank": (
        '{"seed":130283257,"kind":"local","nodes":3,"local":false,"iterations":40,"period_s":3.0,"every":3,"faults":'
        '[["head_disk_stalled",3.94,2,110.0],["head_sleeps",85.14,2,70.0]]}'
    ),
    "what was reached is known once there is room for its events, and that a node that is left out may have a state": (
        '{"seed":482480305,"local":false,"iterations":6,"period_s":0.2,"every":0,"min_nodes":1,"faults":'
        '[["head_disk_full",3.78,0,30.0],["cut",5.58,1,0.0],["rank_killed",5.83,0,7.0]]}'
    ),
    "why the ranks were ended is lost with a supervisor whose disk was full, and is not that another rank lost them": (
        '{"seed":400778015,"kind":"local","nodes":5,"iterations":5,"period_s":3.0,"every":0,"recovery":2,"faults":'
        '[["node_sleeps",2.44,3,70.0],["head_disk_full",3.95,1,70.0],["head_killed_at_effect",57,1,30.0]]}'
    ),
    "an attempt that never started, and was not recorded on a full disk, leaves its number to one on other nodes": (
        '{"kind":"direct","nodes":5,"local":false,"iterations":8,"period_s":3.0,"every":3,"min_nodes":4,"faults":'
        '[["rank_killed",4.41,1,7.0],["head_disk_full",4.44,1,12.0],["head_power",8.33,3,0.4],'
        '["agent_stopped",9.11,4,180.0]]}'
    ),
    "a rank that fails after it has reported its end has not completed, and an abort meanwhile is one": (
        '{"kind":"shared","local":false,"iterations":5,"every":0,"faults":[["rank_lingers",5.15,0,0.0],'
        '["abort",24.79,1,12.0],["rank_exits",26.99,0,7.0]]}'
    ),
    "an abort is lost with a supervisor whose disk was full, and the ranks that it stopped are not what was lost": (
        '{"seed":424796125,"iterations":8,"period_s":3.0,"every":3,"faults":[["head_disk_full",3.11,0,400.0],'
        '["abort",3.38,0,180.0],["head_killed_at_effect",27,0,110.0]]}'
    ),
    "ranks that stopped together with one that was fenced without a record did so because of that one": (
        '{"seed":215173522,"kind":"sharded","nodes":4,"iterations":12,"period_s":3.0,"every":10,"recovery":3,"faults":'
        '[["cut",3.3,2,30.0],["keeper_stopped",34.17,2,18.0]]}'
    ),
    "that the supervisor was held up for less than 15 s by its disk is no hang of a rank, either": (
        '{"seed":87334681,"kind":"local","local":false,"period_s":1.0,"every":3,"recovery":5,"faults":'
        '[["head_disk_stalled",5.69,1,18.0],["head_sleeps",22.73,0,18.0]]}'
    ),
    "a disk that stalls and is full then makes no hang that an adopter takes for a lost peer": (
        '{"seed":844923279,"kind":"torch","nodes":3,"iterations":40,"every":10,"recovery":2,"faults":'
        '[["head_disk_stalled",19.31,1,30.0],["head_disk_full",44.63,1,30.0],["head_killed_at_effect",49,3,30.0]]}'
    ),
    "a rank that fails after it has reported its end has completed where nothing but that report is left": (
        '{"iterations":7,"period_s":1.0,"every":0,"faults":[["keeper_stopped",4.0,1,400.0],["rank_lingers",5.28,1,110.0],'
        '["diverged",24.34,1,7.0]]}'
    ),
    "what a node that is cut off and left out has trained by itself is given up with local steps": (
        '{"seed":57282359,"kind":"local","nodes":3,"local":false,"iterations":7,"min_nodes":2,"faults":'
        '[["cut",3.96,2,0.0],["keeper_killed",5.89,1,12.0],["rank_killed",5.99,0,18.0]]}'
    ),
    "that a connection ends before its node has reported its ranks is no answer": (
        '{"seed":587064355,"kind":"torch","nodes":6,"iterations":5,"every":3,"faults":[["agent_killed",1.46,0,0.0],'
        '["agent_killed",3.33,0,0.0]]}'
    ),
    "a node that is not connected again after a sleep of the head that ended the others' leases is not the cause": (
        '{"seed":171873878,"kind":"torch","nodes":7,"iterations":6,"period_s":3.0,"every":0,"recovery":7,"faults":'
        '[["head_sleeps",5.88,3,30.0],["head_stopped",39.17,1,2.0]]}'
    ),
    "what rank 0 of local steps has trained unseen is given up with its node": (
        '{"seed":1012788033,"kind":"local","local":false,"iterations":8,"period_s":0.2,"every":3,"min_nodes":1,'
        '"recovery":2,"faults":[["slow",0.26,0,30.0],["keeper_killed",4.32,1,180.0],["cut",4.79,0,70.0]]}'
    ),
    "a rank that its lease has ended did not fail to answer when the others left a hang": (
        '{"seed":672066691,"kind":"torch","nodes":3,"iterations":8,"every":0,"recovery":7,"faults":'
        '[["unfit",0.0,1,12.0],["disk_stalled",9.1,0,110.0],["head_sleeps",29.44,1,180.0]]}'
    ),
    "that a node was restarted is known of a rank that an adopter first sees then": (
        '{"kind":"elastic","local":false,"iterations":15,"recovery":7,"faults":[["start_fails",4.17,1,0.0],'
        '["head_killed_at_effect",9,1,7.0],["power",10.28,1,7.0]]}'
    ),
    "what ranks of an earlier life had started is no start of an attempt that an adopter of the queue's run plans": (
        '{"kind":"elastic","local":false,"iterations":5,"every":3,"budget_s":33.36,"unattended":true,"faults":'
        '[["resume",5.92,0,45.0],["rank_killed",6.04,0,400.0],["head_power",8.22,1,110.0],'
        '["head_killed_at_effect",52,0,70.0]]}'
    ),
    "a clock that is put back after the budget was spent, and an abort after that, do not unspend it": (
        '{"seed":225841758,"nodes":3,"iterations":8,"period_s":0.2,"budget_s":2.18,"unattended":true,"faults":'
        '[["head_clock",4.32,0,30.0],["abort",5.56,1,70.0]]}'
    ),
    "of attempts that never started, and that a full disk forgot, the one that is planned anew is the newest": (
        '{"kind":"torch","iterations":6,"period_s":1.0,"every":0,"min_nodes":1,"unattended":true,"faults":'
        '[["disk_full",4.14,0,180.0],["node_sleeps",5.57,1,400.0],["head_killed_at_effect",56,0,70.0]]}'
    ),
    "a rank whose keeper was killed while a hang was ended is not the one that stalled": (
        '{"seed":145439209,"nodes":4,"local":false,"period_s":0.2,"every":3,"recovery":1,"faults":'
        '[["disk_stalled",6.89,4,30.0],["keeper_killed",25.04,5,12.0]]}'
    ),
    "a keeper that an earlier supervisor killed at an end that a full disk forgot is not what began it": (
        '{"kind":"local","nodes":3,"local":false,"iterations":7,"period_s":1.0,"every":3,"faults":'
        '[["head_disk_full",4.49,1,110.0],["rank_stopped",5.17,2,45.0],["cut_from",11.85,2,70.0],'
        '["rank_killed",23.08,0,180.0],["head_killed",32.93,1,180.0]]}'
    ),
    "a rank whose record comes while the verdict of an abort is made is judged with it": (
        '{"seed":871794540,"kind":"local","nodes":4,"local":false,"iterations":15,"period_s":1.0,"recovery":6,'
        '"budget_s":13.06,"faults":[["isolated",3.99,0,18.0]]}'
    ),
    "ranks that lost a peer which an earlier supervisor ended, at an end that a full disk forgot, began no end": (
        '{"seed":255499713,"kind":"sharded","nodes":4,"iterations":5,"every":0,"faults":[["head_disk_full",4.7,1,30.0],'
        '["head_sleeps",5.6,2,18.0],["abort_now",10.9,2,180.0],["head_killed_at_effect",49,3,18.0]]}'
    ),
    "a lost node that comes back with its work done is the cause, and not the rank that left for it": (
        '{"seed":207983773,"kind":"torch","nodes":3,"local":false,"iterations":40,"period_s":0.2,"recovery":1,"faults":'
        '[["head_sleeps",6.61,2,7.0],["head_disk_full",11.42,0,18.0],["node_sleeps",12.14,2,30.0]]}'
    ),
    "a rank that is ended while another does the rest of its work did not fail to answer": (
        '{"seed":327445591,"kind":"direct","iterations":8,"period_s":0.2,"every":0,"recovery":4,"faults":'
        '[["head_disk_stalled",5.0,0,180.0]]}'
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_it_is_mended(name: str) -> None:
    assert simulate(Scenario.from_json(HISTORIES[name])).violation is None
