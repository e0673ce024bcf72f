from dataclasses import dataclass
@dataclass(frozen=True,kw_only=True)
class Event:
    rank:int;stream:str;name:str;kind:str;tags:dict;start_s:float;end_s:float
@dataclass(frozen=True,kw_only=True)
class Timeline:
    events:tuple
