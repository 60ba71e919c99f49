prelude
import Core
theorem s : "theorem t : False" = "theorem t : False" := rfl
