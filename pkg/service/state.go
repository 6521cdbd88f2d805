package service

import "time"

// State is what the maps of Services hold, and whose it is. It starts with what a former agent has left.
//
//	state := service.Load(options, content)
//	for update := range updates {
//		changed := model.Apply(update)
//		write(state.Plan(model, changed, time.Now()))
//		state.Written(time.Now())
//	}
type State struct{}

// Load makes a State of what the maps hold; of maps that are new, it is empty. Nothing has to be written before the first Plan.
func Load(o Options, c Content) *State { panic("to come") }

// Configure changes the options and returns the Services that have to be planned anew. The capacities stay.
func (s *State) Configure(o Options, m *Model) (changed []Name) { panic("to come") }

// Plan returns what has to be written after the named Services or their slices have changed. All of it counts as written from
// now on. Nothing is to be written before the model is complete; the first Plan after that also removes what the maps hold of
// Services that are gone.
func (s *State) Plan(m *Model, changed []Name, now time.Time) Writes { panic("to come") }

// Written tells that the writes of the last Plan have been carried out: from then on Grace counts.
func (s *State) Written(now time.Time) { panic("to come") }

// Again is when Plan has to be called though nothing has changed, since what is refused may have room then; zero: it need not.
func (s *State) Again() time.Time { panic("to come") }

// Repair returns what has to be written where the maps do not hold what they should, because a write failed or somebody else
// wrote. It changes no State.
func (s *State) Repair(c Content) Writes { panic("to come") }

// Problems lists what is wrong now, by the names of the Services.
func (s *State) Problems() []Problem { panic("to come") }

// Name returns whose set it is; false: nobody's.
func (s *State) Name(set uint32) (name Name, port string, ok bool) { panic("to come") }
