package service

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
)

// Compare sorts by namespace, then by name.
func (n Name) Compare(o Name) int {
	return cmp.Or(cmp.Compare(n.Namespace, o.Namespace), cmp.Compare(n.Name, o.Name))
}

// String is "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Model holds the objects as they are now.
type Model struct {
	complete bool
	services map[Name]*Service
	slices   map[Name]*Slice
	// of has the slices of each Service, whether or not the Service is there, sorted by name.
	of map[Name][]*Slice
	// clusterIPs are the Services by their ClusterIPs, claimed by their other addresses.
	clusterIPs, claimed claims
}

// NewModel is a model of which nothing is known.
func NewModel() *Model {
	return &Model{
		services: map[Name]*Service{}, slices: map[Name]*Slice{}, of: map[Name][]*Slice{}, clusterIPs: claims{}, claimed: claims{},
	}
}

// Complete says whether all objects have been delivered once.
func (m *Model) Complete() bool { return m.complete }

// Service returns the Service of that name; nil: there is none.
func (m *Model) Service(n Name) *Service { return m.services[n] }

// Slices returns the slices of a Service, sorted by name. The caller must not change them.
func (m *Model) Slices(n Name) []*Slice { return m.of[n] }

// Len is how many Services there are.
func (m *Model) Len() int { return len(m.services) }

// Names returns the names of all Services, sorted.
func (m *Model) Names() []Name { return slices.SortedFunc(maps.Keys(m.services), Name.Compare) }

// Apply takes an update in and returns the names, sorted, of the Services that are new, gone or changed, themselves or their
// slices. What comes before the first complete update is nothing to go by, nor is an update with an error.
func (m *Model) Apply(u Update) []Name {
	if u.Err != nil || !u.Complete && !m.complete {
		return nil
	}
	changed := map[Name]bool{}
	if u.Complete {
		m.complete = true
		u.GoneServices = missing(m.services, u.Services, func(s *Service) Name { return s.Name })
		u.GoneSlices = missing(m.slices, u.Slices, func(s *Slice) Name { return s.Name })
	}
	for _, n := range u.GoneServices {
		if s := m.services[n]; s != nil {
			m.index(s, claims.remove, changed)
			delete(m.services, n)
			changed[n] = true
		}
	}
	for _, n := range u.GoneSlices {
		m.take(n, changed)
	}
	for i := range u.Services {
		m.putService(&u.Services[i], changed)
	}
	for i := range u.Slices {
		m.putSlice(&u.Slices[i], changed)
	}
	return slices.SortedFunc(maps.Keys(changed), Name.Compare)
}

func (m *Model) putService(s *Service, changed map[Name]bool) {
	have := m.services[s.Name]
	if have != nil && reflect.DeepEqual(have, s) {
		return
	}
	if have != nil {
		m.index(have, claims.remove, changed)
	}
	kept := *s
	m.services[s.Name] = &kept
	m.index(&kept, claims.add, changed)
	changed[s.Name] = true
}

func (m *Model) putSlice(s *Slice, changed map[Name]bool) {
	if have := m.slices[s.Name]; have != nil && reflect.DeepEqual(have, s) {
		return
	}
	m.take(s.Name, changed)
	kept := *s
	m.slices[s.Name] = &kept
	at, _ := slices.BinarySearchFunc(m.of[kept.owner()], &kept, compareSlices)
	m.of[kept.owner()] = slices.Insert(m.of[kept.owner()], at, &kept)
	m.noteSlice(&kept, changed)
}

// take removes a slice, if it is there.
func (m *Model) take(n Name, changed map[Name]bool) {
	s := m.slices[n]
	if s == nil {
		return
	}
	owner := s.owner()
	delete(m.slices, n)
	m.of[owner] = slices.DeleteFunc(m.of[owner], func(o *Slice) bool { return o == s })
	if len(m.of[owner]) == 0 {
		delete(m.of, owner)
	}
	m.noteSlice(s, changed)
}

// owner is the Service that the slice belongs to.
func (s *Slice) owner() Name { return Name{s.Namespace, s.Service} }

func compareSlices(a, b *Slice) int { return a.Compare(b.Name) }

// missing returns the names that are had and not among all.
func missing[T any](have map[Name]*T, all []T, name func(*T) Name) (gone []Name) {
	there := make(map[Name]bool, len(all))
	for i := range all {
		there[name(&all[i])] = true
	}
	for n := range have {
		if !there[n] {
			gone = append(gone, n)
		}
	}
	return gone
}
