// A function argument that does not own what it calls: make it from a lambda in the call's argument list.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

namespace spice::policy {

template <class Signature>
class FunctionRef;

template <class R, class... Args>
class FunctionRef<R(Args...)> {
  public:
    template <class F>
        requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef> &&
                 std::is_invocable_r_v<R, const F &, Args...>)
    FunctionRef(const F &f) // NOLINT(google-explicit-constructor): made for argument lists
        : object_(&f), call_([](const void *object, Args... args) -> R {
              return (*static_cast<const F *>(object))(std::forward<Args>(args)...);
          }) {}
    R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

  private:
    const void *object_;
    R (*call_)(const void *, Args...);
};

} // namespace spice::policy
